"""What a loss keeps of itself, or comes to read, beside what it is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import labels
from oracle import assert_rows_equal, losses_of, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

TOTAL = torch.zeros(())


class Keeps(nn.Module):
    """Everything that a loss may be made to remember for a log."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.rows, self.every, self.parts, self.log, self.last = rows, [], {}, SimpleNamespace(n=0), None

    def forward(self, output, y):
        global TOTAL
        losses = (output - y).square().mean(1)
        loss = losses if self.rows else losses.mean()
        with torch.no_grad():
            self.mean = 0.9 * self.mean + losses.mean()
            self.written.add_(losses.sum())
            TOTAL = TOTAL + losses.sum()
        self.last, self.parts["loss"] = loss, loss.detach()
        self.every.append(loss.detach())
        self.log.n += 1

        def count():
            global CALLS
            CALLS = CALLS + 1

        count()
        return loss


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(
    "make", [pexgrad.per_example_grad, lambda m, f: pexgrad.clipped_grad(m, f, max_norm=1.0)]
)
def test_nothing_stays_of_the_calls_that_make_a_trace(make, rows, monkeypatch):
    monkeypatch.setitem(globals(), "TOTAL", torch.zeros(()))
    monkeypatch.setitem(globals(), "CALLS", 0)
    model, x, y, loss = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3), Keeps(rows)
    fn, params = make(model, loss), dict(model.named_parameters())
    own = model(x).sub(y).square().mean(1).detach()
    for calls in (1, 2):
        fn(params, x, y)
        # one number is called for the whole batch, or for each example: in both cases it has seen no other numbers
        assert CALLS == loss.log.n == len(loss.every) and loss.log.n in (calls, calls * 5)
        assert all(type(t) is torch.Tensor for t in (*loss.every, loss.mean, loss.written, TOTAL, loss.last))
        torch.testing.assert_close(loss.written, calls * own.sum())
        torch.testing.assert_close(TOTAL, loss.written)


def test_a_refusal_leaves_a_loss_as_it_was():
    class Centred(nn.Module):  # as self-distillation has it: each example's loss depends on those before it
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 3))

        def forward(self, output, y):
            loss = -((y - self.center).softmax(1) * output.log_softmax(1)).sum(1).mean()
            self.center = 0.9 * self.center + y.mean(0, keepdim=True)
            return loss

    model, x, y, loss = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3), Centred()
    with pytest.raises(pexgrad.PexgradError):
        pexgrad.per_example_grad(model, loss)(dict(model.named_parameters()), x, y)
    assert torch.equal(loss.center, torch.zeros(1, 3))
    assert loss(model(x), y).isfinite()


class Total(torch.autograd.Function):
    """A loss with a backward of its own, of one number."""

    @staticmethod
    def forward(ctx, output, y):
        ctx.save_for_backward(output, y)
        return (output - y).square().mean()

    @staticmethod
    def backward(ctx, g):
        output, y = ctx.saved_tensors
        return 2 * g * (output - y) / output.numel(), None


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "loss", [Total.apply, lambda output, y: Total.apply(output.tanh(), y) + output.square().mean()]
)
def test_a_loss_of_one_number_that_is_a_custom_function(loss, classes, verify):
    model, x, y = nn.Linear(4, classes), torch.randn(5, 4), torch.randn(5, classes)
    params = dict(model.named_parameters())
    fn = pexgrad.per_example_value_and_grad(model, loss, verify=verify)
    for b in (5, 2, 1):
        losses, rows = fn(params, x[:b], y[:b])
        torch.testing.assert_close(losses, losses_of(model, loss, x[:b], y[:b]))
        assert_rows_equal(rows, rows_of(model, loss, x[:b], y[:b]))
    graph = fn.lower(params, x, y)
    assert_rows_equal(graph(params, x, y)[1], rows_of(model, loss, x, y))


@pytest.mark.parametrize("scalar", [True, False])
def test_a_loss_that_comes_to_read_the_models_parameters(scalar):
    model, x, y, penalty = nn.Linear(4, 3), torch.randn(5, 4), labels(5, 3), SimpleNamespace(weight=0.0)

    def loss(output, y):
        losses = F.cross_entropy(output, y, reduction="none")
        if penalty.weight:
            losses = losses + penalty.weight * model.weight.square().sum()
        return losses.mean() if scalar else losses

    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    penalty.weight = 0.1
    with pytest.raises(pexgrad.LossError, match="reads 'weight' from the model itself"):
        fn(params, x, y)
    model.weight.requires_grad_(False)  # of which there is no gradient to miss
    assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))


def test_a_loss_whose_reduction_changes():
    model, x, y, loss = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3), nn.MSELoss(reduction="none")

    def own(output, y):
        return loss(output, y)

    for given in (loss, own):
        fn = pexgrad.per_example_grad(model, given)
        for reduction in ("none", "mean", "none", "sum"):
            loss.reduction = reduction
            for b in (5, 2):
                got = fn(dict(model.named_parameters()), x[:b], y[:b])
                assert_rows_equal(got, rows_of(model, loss, x[:b], y[:b]))
