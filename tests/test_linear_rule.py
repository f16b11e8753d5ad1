"""Linear layers with any leading dimensions: the properties, and the loop over a grid."""

from __future__ import annotations

import itertools

import properties
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from oracle import assert_rows_equal, rows_of
from strategies import linear_configs

import pexgrad
from pexgrad import tap

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", [(), (1,), (4,), (2, 3), (1, 3, 2)])
@pytest.mark.parametrize("b", [1, 2, 4])
def test_against_the_loop(b, positions, bias):
    layer = torch.nn.Linear(4, 3, bias=bias)
    properties.check_against_the_loop(layer, torch.randn(b, *positions, 4))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_each_operand_has_a_rule_of_its_own(frozen):
    layer = torch.nn.Linear(4, 3)
    getattr(layer, frozen).requires_grad_(False)
    properties.check_against_the_loop(layer, torch.randn(3, 2, 4))


@pytest.mark.parametrize(("b", "t", "i", "o"), list(itertools.product([2, 3], repeat=4)))
def test_batch_equal_to_other_sizes(b, t, i, o):
    properties.check_against_the_loop(torch.nn.Linear(i, o), torch.randn(b, t, i))


CHECKS = [check for name, check in vars(properties).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@given(config=linear_configs())
@settings(max_examples=12)
def test_properties(check, config):
    check(*config.build())


class Logits(torch.nn.Module):
    """Their loss wants the classes on dimension 1, so their cotangent arrives transposed."""

    def __init__(self, inplace):
        super().__init__()
        self.body, self.head, self.inplace = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3), inplace

    def forward(self, x):
        logits = self.head(self.body(x).tanh())
        return (logits.mul_(2) if self.inplace else logits * 1).movedim(-1, 1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("large", [0, tap.LARGE], ids=["copied once", "left"])
def test_a_cotangent_that_arrives_transposed(monkeypatch, large, inplace):
    monkeypatch.setattr(tap, "LARGE", large)
    model, x, y = Logits(inplace), torch.randn(2, 5, 4), torch.randint(3, (2, 5))
    loss = lambda out, y: F.cross_entropy(out, y, reduction="none").sum(-1)  # noqa: E731
    jacobian = pexgrad.per_example_jacobian(model, loss)(dict(model.named_parameters()), x, y)
    assert_rows_equal(jacobian.rows(), rows_of(model, loss, x, y))
    (head,) = (t.factor for t in jacobian.terms if t.params == ("head.weight",))
    lies = head.g.stride()[-1] == 1
    assert lies == (large == 0 and not inplace), "a large one is brought into order before it goes on"


def test_a_cotangent_copied_on_arrival_can_be_differentiated_again(monkeypatch):
    monkeypatch.setattr(tap, "LARGE", 0)
    model, x, y = Logits(inplace=False), torch.randn(2, 5, 4), torch.randint(3, (2, 5))
    loss = lambda out, y: F.cross_entropy(out, y, reduction="none").sum(-1)  # noqa: E731
    fn = pexgrad.per_example_grad(model, loss, create_graph=True)
    names, values = zip(*((k, p.detach().requires_grad_()) for k, p in model.named_parameters()), strict=True)
    assert torch.autograd.gradcheck(
        lambda *p: tuple(fn(dict(zip(names, p, strict=True)), x, y).values()), values
    )
