"""What each strategy does: how often the model runs, on what, and with whose memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def watched():
    """A model that keeps the input and the weight of every call."""
    calls = []

    def forward(s, x):
        calls.append((x, s.lin.weight))
        return s.lin(x)

    return Net(forward, lin=nn.Linear(4, 5)), calls


def named(model):
    return dict(model.named_parameters())


@pytest.mark.parametrize("strategy", ["naive", "multi"])
def test_one_forward_for_each_example(strategy):
    model, calls = watched()
    pexgrad.per_example_grad(model, strategy=strategy)(named(model), torch.randn(3, 4), labels(3))
    assert [len(x) for x, _ in calls] == [1, 1, 1]


def test_multi_gives_every_example_an_alias_of_the_parameters():
    model, calls = watched()
    params = {name: p.detach() * 2 for name, p in named(model).items()}
    pexgrad.per_example_grad(model, strategy="multi")(params, torch.randn(4, 4), labels(4))
    # the first gets a copy, which shows whether the forward writes into it
    assert {w.data_ptr() for _, w in calls[1:]} == {params["lin.weight"].data_ptr()}
    assert len({id(w) for _, w in calls}) == 4


@pytest.mark.parametrize(("strategy", "backwards"), [("naive", 3), ("multi", 1), ("crb", 1)])
def test_how_many_backwards(strategy, backwards):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    x, y = torch.randn(3, 4), labels(3)
    fn(named(model), x, y)  # a first call may trace and verify
    with mock.patch("torch.autograd.grad", wraps=torch.autograd.grad) as grad:
        fn(named(model), x, y)
    assert grad.call_count == backwards


def test_crb_does_not_run_the_module_once_it_is_traced():
    model, calls = watched()
    fn = pexgrad.per_example_grad(model)
    x, y = torch.randn(3, 4), labels(3)
    fn(named(model), x, y)
    calls.clear()
    rows = fn(named(model), x, y)
    assert not calls
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_the_cotangent_pass_computes_no_gradient_of_a_parameter():
    """The one backward ends at activations, which have a history, and not at leaves."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    fn = pexgrad.per_example_grad(model)
    x, y = torch.randn(3, 4), labels(3)
    fn(named(model), x, y)
    with mock.patch("torch.autograd.grad", wraps=torch.autograd.grad) as grad:
        fn(named(model), x, y)
    (_, inputs, *_), _ = grad.call_args
    nodes = [getattr(t, "node", None) or t.grad_fn for t in inputs]
    assert nodes and all(node is not None and type(node).__name__ != "AccumulateGrad" for node in nodes)


@pytest.mark.parametrize("strategy", ["naive", "multi"])
def test_nothing_is_traced(strategy):
    model = nn.Linear(4, 5)
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    fn(named(model), torch.randn(3, 4), labels(3))
    assert fn.trace_count == 0


class Reversible(torch.autograd.Function):
    """Computes its block again on the way back, and leaves the gradients to .backward(), as reversible layers do."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.block(x).backward(g)
        return x.grad, None


@pytest.mark.parametrize("strategy", ["naive", "multi"])
def test_a_backward_inside_the_backward_is_refused(strategy):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(Reversible.apply(self.first(x), self.block))

    model = Model()
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    with pytest.raises(
        pexgrad.TraceError, match=r"calls .backward\(\) .* gives 'block.weight' a gradient past"
    ):
        fn(dict(model.named_parameters()), torch.randn(3, 4), torch.tensor([0, 2, 1]))
    assert all(p.grad is None for p in model.parameters())
