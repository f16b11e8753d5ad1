"""Rules of the user's own: registering, checking, and catching one that is wrong."""

from __future__ import annotations

import pytest
import torch
from cases.case import wave
from oracle import assert_rows_equal, rows_of_function

import pexgrad
from pexgrad.extend import Broadcast, Outer, Rows, check_rule, register_rule, registered, replaced

pytestmark = pytest.mark.usefixtures("double")

aten = torch.ops.aten


def linear(params, x):
    return torch.nn.functional.linear(x, params["w"], params["b"])


def linear_params():
    return {"w": torch.randn(5, 4), "b": torch.randn(5)}


def cosine(params, x):
    """An operation without a rule: it goes through the fallback."""
    return torch.cosine_similarity(x[:, None], params["w"][None], dim=-1)


@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
def test_a_right_rule_passes(positions):
    check_rule(linear, linear_params(), torch.randn(3, *positions, 4))


def test_the_fallback_passes():
    check_rule(cosine, {"w": torch.randn(5, 4)}, torch.randn(3, 4))


def test_single_precision_is_checked_in_double():
    check_rule(linear, {k: p.float() for k, p in linear_params().items()}, torch.randn(3, 4).float())


def doubled(g, input, *, shape, dtype):
    return Outer(2 * g.flatten(1, -2)[:, :, None], input.flatten(1, -2)[:, :, None], shape, dtype)


def example_forgotten(g, input, *, shape, dtype):
    keep = (torch.arange(len(g)) > 0).view(-1, 1, 1, 1)
    return Outer(keep * g.flatten(1, -2)[:, :, None], input.flatten(1, -2)[:, :, None], shape, dtype)


def examples_mixed(g, input, *, shape, dtype):
    return Outer(g.flatten(1, -2)[:, :, None].roll(1, 0), input.flatten(1, -2)[:, :, None], shape, dtype)


def first_position_only(g, input, *, shape, dtype):
    return Outer(g.flatten(1, -2)[:, :1, None], input.flatten(1, -2)[:, :1, None], shape, dtype)


def transposed(g, input, *, shape, dtype):
    rows = torch.einsum("bto,bti->bio", g.flatten(1, -2), input.flatten(1, -2))
    return Rows(rows.reshape(len(g), *shape))


@pytest.mark.parametrize(
    "wrong", [doubled, example_forgotten, examples_mixed, first_position_only, transposed]
)
def test_a_wrong_rule_is_caught(wrong):
    with (
        replaced(aten.linear.default, "weight", wrong),
        pytest.raises(pexgrad.PexgradError, match=r"(?s)w.*relative error"),
    ):
        check_rule(linear, linear_params(), torch.randn(3, 2, 4))
    check_rule(linear, linear_params(), torch.randn(3, 2, 4))  # the right one is back


def test_a_wrong_rule_is_caught_by_the_verification_of_a_call():
    params, x = linear_params(), torch.randn(3, 2, 4)
    with (
        replaced(aten.linear.default, "weight", examples_mixed),
        pytest.raises(pexgrad.PexgradError, match=r"(?s)'w'"),
    ):
        pexgrad.per_example_grad(linear, wave)(params, x)
    with (
        replaced(aten.linear.default, "weight", doubled),
        pytest.raises(pexgrad.PexgradError, match=r"(?s)'w'"),
    ):
        pexgrad.per_example_grad(linear, wave)(params, x)


def test_a_wrong_rule_of_a_bias_is_caught():
    def half(g, *, shape, dtype):
        return Broadcast(g.flatten(1, -2) / 2, None, shape, dtype)

    with (
        replaced(aten.linear.default, "bias", half),
        pytest.raises(pexgrad.PexgradError, match=r"(?s)b.*relative error"),
    ):
        check_rule(linear, linear_params(), torch.randn(3, 4))


def test_without_a_rule_the_fallback_takes_over():
    params, x = linear_params(), torch.randn(3, 2, 4)
    with replaced(aten.linear.default, "weight", None):
        fn = pexgrad.per_example_grad(linear, wave)
        assert "fallback" in repr(fn.explain(params, x))
        assert_rows_equal(fn(params, x), rows_of_function(linear, params, wave, x, None))


def outer(params, x):
    return torch.outer(x, params["v"])


def test_a_new_rule_takes_the_place_of_the_fallback():
    params, x = {"v": torch.randn(5)}, torch.randn(3)
    with replaced(aten.outer.default, "vec2", None):
        assert "fallback" in repr(pexgrad.per_example_grad(outer, wave).explain(params, x))

        @register_rule(aten.outer.default, "vec2")
        def outer_vector(g, self, *, shape, dtype):  # (b, t, o), (b, t)
            return Rows(torch.einsum("bto,bt->bo", g, self))

        fn = pexgrad.per_example_grad(outer, wave)
        table = repr(fn.explain(params, x))
        assert "fallback" not in table and "outer_vector" in table
        assert_rows_equal(fn(params, x), rows_of_function(outer, params, wave, x, None))
        check_rule(outer, params, x)
    assert (aten.outer.default, "vec2") not in registered()


def test_a_rule_that_names_what_the_operation_does_not_have():
    with pytest.raises(pexgrad.PexgradError, match=r"(?s)inputs.*input"):

        @register_rule(aten.linear.default, "weight")
        def rule(g, inputs, *, shape, dtype):
            raise AssertionError

    with pytest.raises(pexgrad.PexgradError, match=r"(?s)weights"):
        register_rule(aten.linear.default, "weights")(doubled)
