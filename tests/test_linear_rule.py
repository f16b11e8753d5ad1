"""Linear layers with any leading dimensions: the properties, and the loop over a grid."""

from __future__ import annotations

import itertools

import properties
import pytest
import torch
from hypothesis import given, settings
from strategies import linear_configs

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
