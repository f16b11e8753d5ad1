"""Rules of the user's own: registering, checking, and catching one that is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases.case import wave
from oracle import assert_rows_equal, rows_of_function

import pexgrad
from pexgrad.extend import Broadcast, Factor, Outer, Rows, check_rule, register_rule, registered, replaced

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


def test_check_rule_takes_parameters_that_are_complex_or_have_no_dimensions():
    check_rule(
        lambda p, x: torch.nn.functional.linear(x, p["w"]),
        {"w": torch.randn(4, 3, dtype=torch.complex64)},
        torch.randn(5, 3, dtype=torch.complex64),
    )
    check_rule(lambda p, x: x * p["a"], {"a": torch.tensor(2.0)}, torch.randn(5, 3))


@dataclass(frozen=True, eq=False)
class Diagonal(Factor):
    """Rows (b, n, n) of diagonals d, with names of its own for its tensors, and ways to inner products of its own."""

    d: torch.Tensor  # (b, n)
    shape: tuple
    dtype: torch.dtype

    tensors = ("d",)

    def rows(self, out=None):
        rows = torch.diag_embed(self.d).to(self.dtype)
        return rows if out is None else out.copy_(rows)

    def _inner(self, other):
        return (self.d * other.d).sum(1) if isinstance(other, Diagonal) else None


def test_a_factor_of_ones_own():
    d, g, x = torch.randn(5, 3), torch.randn(5, 2, 1, 3), torch.randn(5, 2, 1, 3)
    mine, outer = Diagonal(d, (3, 3), d.dtype), Outer(g, x, (3, 3), g.dtype)
    rows, others = torch.diag_embed(d), torch.einsum("btho,bthi->boi", g, x)
    assert mine.batch == 5 and mine.take(slice(1, 3)).batch == 2
    torch.testing.assert_close(mine.sq_norms(), d.square().sum(1))
    torch.testing.assert_close(mine.inner(mine), d.square().sum(1))
    for a, b in ((mine, outer), (outer, mine)):
        torch.testing.assert_close(a.inner(b), (rows * others).sum((1, 2)))
    torch.testing.assert_close(mine.gram(outer), torch.einsum("boi,coi->bc", rows, others))
    torch.testing.assert_close(outer.gram(mine), torch.einsum("boi,coi->bc", others, rows))


def test_half_precision_of_a_factor_of_ones_own_is_added_up_in_single():
    d = torch.full((2, 3), 300.0, dtype=torch.float16)
    assert Diagonal(d, (3, 3), d.dtype).sq_norms().tolist() == [270000.0] * 2
