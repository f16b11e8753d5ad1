"""The property tests for users, tested on mistakes: planted rules are caught, and the counterexample is small."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import pretty

import pexgrad
from pexgrad.extend import Broadcast, Outer, replaced
from pexgrad.testing import (
    batches,
    check_per_example_grad,
    check_rule,
    conv_configs,
    linear_configs,
    models,
    parameters,
)

aten = torch.ops.aten


@given(models(), st.data())
@settings(max_examples=20)
def test_any_model_passes(model, data):
    x, y = data.draw(batches(model))
    check_per_example_grad(model, x, y)


@given(models(), st.data())
@settings(max_examples=5)
def test_parameters_are_the_models(model, data):
    module, (x, y) = model.module().double(), data.draw(batches(model))
    values = data.draw(parameters(model))
    assert {k: (p.shape, p.dtype) for k, p in values.items()} == {
        k: (p.shape, p.dtype) for k, p in module.named_parameters()
    }
    fn = pexgrad.per_example_grad(module, verify=False)
    naive = pexgrad.per_example_grad(module, strategy="naive")
    torch.testing.assert_close(fn(values, x, y), naive(values, x, y))


@given(models())
@settings(max_examples=20)
def test_a_model_prints_as_the_code_that_makes_it(model):
    again = eval(repr(model), {"nn": nn})
    shapes = {k: p.shape for k, p in again.named_parameters()}
    assert shapes == {k: p.shape for k, p in model.module().named_parameters()}


@given(st.one_of(conv_configs(), linear_configs()))
@settings(max_examples=5)
def test_configurations_are_the_same_each_time(config):
    before = torch.get_rng_state()
    (layer, x), (again, x2) = config.build(), config.build()
    assert torch.equal(x, x2) and all(
        torch.equal(p, q) for p, q in zip(layer.parameters(), again.parameters(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), before)


# --- planted mistakes -----------------------------------------------------------------------------------


def counterexample(**options):
    """What the property test says of the smallest model that fails."""

    @given(models(**options), st.data())
    @settings(max_examples=100, database=None, phases=[Phase.generate, Phase.shrink])
    def test(model, data):
        x, y = data.draw(batches(model))
        check_per_example_grad(model, x, y)

    with pytest.raises(pexgrad.VerificationError) as caught:
        test()
    return str(caught.value)


def doubled(g, input, *, shape, dtype):
    return Outer(2 * g.flatten(1, -2)[:, :, None], input.flatten(1, -2)[:, :, None], shape, dtype)


def test_a_wrong_factor_is_caught_and_shrunk():
    with replaced(aten.linear.default, "weight", doubled):
        said = counterexample(kinds=("vector",), max_layers=1)
    assert "the rows of '0.weight' differ from the definition" in said
    assert "model = nn.Sequential(nn.Linear(1, 3))\n# x: (1, 1) float64\n# y: (1,) int64" in said


def mixed(g, *, shape, dtype):
    return Broadcast(
        g.flatten(2, -1).flip(0).unflatten(2, (-1, g.shape[-1])).flatten(1, 2), None, shape, dtype
    )


def test_rows_of_another_example_are_caught():
    with replaced(aten.linear.default, "bias", mixed):
        said = counterexample(kinds=("vector",), max_layers=0)
    assert "the rows of '0.bias'" in said and "# x: (2, 1) float64" in said


def norms_only(g, input, *, shape, dtype):
    class Wrong(Outer):
        def sq_norms(self):
            return super().sq_norms() * 1.5

    return Wrong(g.flatten(1, -2)[:, :, None], input.flatten(1, -2)[:, :, None], shape, dtype)


def test_a_wrong_norm_is_caught():
    with replaced(aten.linear.default, "weight", norms_only):
        said = counterexample(kinds=("tokens",), max_layers=0)
    assert "the norms differ" in said and "nn.Embedding(1, 1)" in said


def without_the_first_position(g, *, shape, dtype):
    return Broadcast(g.flatten(3).movedim(2, 3).flatten(1, 2)[:, 1:], None, shape, dtype)


def test_a_wrong_rule_of_a_convolution_is_caught():
    with replaced(aten.conv2d.default, "bias", without_the_first_position):
        said = counterexample(kinds=("image",), max_layers=1)
    assert "the rows of '0.bias'" in said and "model = nn.Sequential(nn.Conv2d(" in said


def forgets_a_position(g, input, *, shape, dtype):
    g, x = (t.flatten(1, -2)[:, 1:] if t.dim() > 3 else t.flatten(1, -2) for t in (g, input))
    return Outer(g[:, :, None], x[:, :, None], shape, dtype)


def test_a_single_layer_that_fails_prints_as_code():
    @given(linear_configs())
    @settings(max_examples=100, database=None, phases=[Phase.generate, Phase.shrink])
    def test(config):
        check_per_example_grad(config, config.build()[1], loss=lambda out, _: out.square().flatten(1).sum(1))

    with (
        replaced(aten.linear.default, "weight", forgets_a_position),
        pytest.raises(pexgrad.VerificationError) as caught,
    ):
        test()
    assert "model = nn.Linear(1, 1" in str(caught.value) and "# x: (1, 1, 1) float64" in str(caught.value)


@given(conv_configs())
@settings(max_examples=10)
def test_a_convolution_prints_as_the_code_that_makes_it(config):
    again, layer = eval(repr(config), {"nn": nn}), config.module()
    assert repr(again) == repr(layer)
    assert pretty(config) == repr(config)  # which is what hypothesis prints of a counterexample


def test_the_check_of_a_rule_is_the_same_one():
    with (
        replaced(aten.linear.default, "weight", doubled),
        pytest.raises(pexgrad.VerificationError, match="rows of 'w'"),
    ):
        check_rule(lambda p, x: F.linear(x, p["w"]), {"w": torch.randn(4, 3)}, torch.randn(2, 3))


def test_a_module_of_ones_own_with_a_loss():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten())
    before = {k: p.clone() for k, p in model.named_parameters()}
    check_per_example_grad(model, torch.randn(3, 2, 4), torch.randn(3, 9), loss=nn.MSELoss())
    assert all(p.dtype == torch.float32 and torch.equal(p, before[k]) for k, p in model.named_parameters())


def test_without_hypothesis_the_checks_work_and_the_strategies_say_what_is_missing():
    code = """
import sys
sys.modules["hypothesis"] = None
import torch, pexgrad
from pexgrad.testing import check_per_example_grad, models
check_per_example_grad(torch.nn.Linear(3, 2), torch.randn(2, 3), torch.tensor([0, 1]))
try:
    models()
except pexgrad.PexgradError as error:
    assert "pexgrad[test]" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_complex_models_are_checked_in_double_precision():
    model = nn.Linear(3, 2, dtype=torch.complex64)
    check_per_example_grad(
        model, torch.randn(4, 3, dtype=torch.complex64), loss=lambda o, _: o.abs().square().sum(1)
    )
