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
from pexgrad.stages import cotangents

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

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def transposed(write):
    def loss(output, y):
        return F.cross_entropy(write(output).movedim(-1, 1), y, reduction="none").sum(-1)

    return loss


def with_zeros(output):
    output[:, 0] = 0
    return output


WRITES = {
    "nothing": lambda o: o,
    "in place": lambda o: o.mul_(2),
    "into a view": with_zeros,
    "masked": lambda o: o.masked_fill_(torch.tensor([True, False, False]), -1e4),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("large", [0, cotangents.LARGE], ids=["copied once", "left"])
def test_a_cotangent_that_arrives_transposed(monkeypatch, large, write):
    """A large one is brought into order before it goes on; the loss may write into the output."""
    monkeypatch.setattr(cotangents, "LARGE", large)
    model, loss, x, y = Logits(), transposed(WRITES[write]), torch.randn(2, 5, 4), torch.randint(3, (2, 5))
    jacobian = pexgrad.per_example_jacobian(model, loss)(dict(model.named_parameters()), x, y)
    assert_rows_equal(jacobian.rows(), rows_of(model, loss, x, y))
    (head,) = (t.factor for t in jacobian.terms if t.params == ("head.weight",))
    if write == "nothing":
        assert (head.g.stride()[-1] == 1) == (large == 0)


def test_a_loss_that_writes_into_an_output_that_is_a_view():
    model, loss, x, y = (
        torch.nn.Linear(4, 3),
        transposed(with_zeros),
        torch.randn(2, 5, 4),
        torch.randint(3, (2, 5)),
    )
    fn = pexgrad.per_example_grad(model, loss, verify=False)
    with pytest.raises(pexgrad.LossError, match="the loss writes into the model's output"):
        fn(dict(model.named_parameters()), x, y)


def test_a_cotangent_copied_on_arrival_can_be_differentiated_again(monkeypatch):
    monkeypatch.setattr(cotangents, "LARGE", 0)
    model, loss, x, y = (
        Logits(),
        transposed(WRITES["nothing"]),
        torch.randn(2, 5, 4),
        torch.randint(3, (2, 5)),
    )
    fn = pexgrad.per_example_grad(model, loss, create_graph=True)
    names, values = zip(*((k, p.detach().requires_grad_()) for k, p in model.named_parameters()), strict=True)
    assert torch.autograd.gradcheck(
        lambda *p: tuple(fn(dict(zip(names, p, strict=True)), x, y).values()), values
    )
