"""Matrix products with a parameter on either side, and einsum.

    y[..., m, o] = sum_i x[..., m, i] w[..., i, o]        G[b, h, i, o] = sum over t, m of x[b, t, h, m, i] g[b, t, h, m, o]
    y[..., m, o] = sum_i w[..., m, i] x[..., i, o]        G[b, h, m, i] = sum over t, o of g[b, t, h, m, o] x[b, t, h, i, o]

h are the leading dimensions that w has of its own; the leading dimensions along which it is repeated are positions.
By letters for the dimensions, a matrix product is an einsum, and one formula gives the rows of both.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ..base.equations import parse
from ..base.nodes import value
from ..factors import Factor, Outer, Permuted
from .linear import together
from .registry import register_rule

aten = torch.ops.aten


def _matrix(
    g: Tensor, x: Tensor, *, first: bool, batch_dim: int, shape: torch.Size, dtype: torch.dtype
) -> Factor:
    """The rule for w in y = w x, where it is the first, or in y = x w: g (b, t, *rest) of y, x (b, t, *rest).

    Small letters are the matrices' dimensions, capital ones those before them.
    """
    own, other, out = ("mi", "io", "mo") if first else ("io", "mi", "mo")
    if len(shape) == 1:
        own, out = "i", "o" if first else "m"
    # y has all the leading dimensions, with the batch's, which g has not; w and x have the last of them
    lead = string.ascii_uppercase[: g.dim() - 1 - len(out)]
    out, other = lead + out, lead[len(lead) - (x.dim() - 3) :] + other
    batch = out[batch_dim]
    out, other = out.replace(batch, ""), other.replace(batch, "")
    sizes = dict(zip(out, g.shape[2:], strict=True))
    of_w = zip(lead[len(lead) - len(shape[:-2]) :], shape, strict=False)
    heads = [c for c, n in of_w if n != 1 or sizes.get(c) == 1]  # along the others w is repeated
    missing = [c for c in heads if c not in other]  # for all of them alike, as it is where x has size 1
    x, other = x[(slice(None), slice(None), *[None] * len(missing))], "".join(missing) + other
    x = x.expand(*x.shape[:2], *(sizes[c] if c in heads else -1 for c in other))
    own_sizes = {c: sizes[c] for c in heads} | dict(zip(own, shape[-2:], strict=True))
    return _contracted(g, x.conj(), own_sizes, other, out, shape, dtype)


def _contracted(
    g: Tensor, x: Tensor, own: dict[str, int], other: str, out: str, shape: torch.Size, dtype: torch.dtype
) -> Factor:
    """The factor of an operand with these letters and sizes: g (b, t, *out) and x (b, t, *other), x conjugated."""
    g, x = together(g, x)
    # letters that only one of the three has: x is summed over them, the row is the same along them
    x, other = _summed(x, other, {*own, *out})

    def shared(with_out: bool, with_other: bool) -> list[str]:
        return [c for c in own if (c in out, c in other) == (with_out, with_other)]

    heads, repeated = shared(True, True), shared(False, False)
    rows, columns = shared(True, False), shared(False, True)
    positions = [c for c in out if c in other and c not in own]

    def arranged(v: Tensor, letters: str, last: list[str]) -> Tensor:  # (b, t, h, o)
        v = v.permute(0, 1, *(2 + letters.index(c) for c in (*positions, *heads, *last)))
        v = v.flatten(1, 1 + len(positions))
        h, o = math.prod(own[c] for c in heads), math.prod(own[c] for c in last)
        return v.reshape(*v.shape[:2], h, o)

    factor = Outer(arranged(g, out, rows), arranged(x, other, columns), shape, dtype)
    if [*heads, *rows, *columns] == [*own]:
        return factor
    if [*heads, *columns, *rows] == [*own]:
        return Outer(factor.x, factor.g, shape, dtype)
    made = [*heads, *rows, *columns, *repeated]
    grid, order = tuple(own[c] for c in made), tuple(made.index(c) for c in own)
    return Permuted(factor.g, factor.x, shape, dtype, grid, len(repeated), order)


def _summed(x: Tensor, letters: str, kept: set[str]) -> tuple[Tensor, str]:
    gone = [i for i, c in enumerate(letters) if c not in kept]
    return (x.sum([2 + i for i in gone]) if gone else x), "".join(c for c in letters if c in kept)


@register_rule(aten.matmul.default, "self")
def matmul_self(g: Tensor, other: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Factor:
    return _matrix(g, other, first=True, batch_dim=batch_dim, shape=shape, dtype=dtype)


@register_rule(aten.matmul.default, "other")
@register_rule(aten.mm.default, "mat2")
@register_rule(aten.bmm.default, "mat2")
def mm_mat2(g: Tensor, self: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Factor:
    return _matrix(g, self, first=False, batch_dim=batch_dim, shape=shape, dtype=dtype)


@register_rule(aten.mm.default, "self")
@register_rule(aten.bmm.default, "self")
def mm_self(g: Tensor, mat2: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Factor:
    return _matrix(g, mat2, first=True, batch_dim=batch_dim, shape=shape, dtype=dtype)


def _conj(alpha: Any) -> Any:
    return alpha.conjugate() if isinstance(alpha, complex) else alpha


@register_rule(aten.addmm.default, "mat2")
def addmm_mat2(
    g: Tensor, mat1: Tensor, *, alpha: float, batch_dim: int, shape: torch.Size, dtype: torch.dtype
) -> Factor:
    return _matrix(g * _conj(alpha), mat1, first=False, batch_dim=batch_dim, shape=shape, dtype=dtype)


@register_rule(aten.addmm.default, "mat1")
def addmm_mat1(
    g: Tensor, mat2: Tensor, *, alpha: float, batch_dim: int, shape: torch.Size, dtype: torch.dtype
) -> Factor:
    return _matrix(g * _conj(alpha), mat2, first=True, batch_dim=batch_dim, shape=shape, dtype=dtype)


# --- einsum -----------------------------------------------------------------------------------------


def _two_plain_operands(arguments: dict[str, Any]) -> bool:
    """An equation in letters alone, none twice in one operand, of two operands that agree in their sizes."""
    terms, _ = parse(arguments["equation"])
    letters = all(t.isalpha() and len(set(t)) == len(t) for t in terms)
    if len(terms) != 2 or not letters or not all(isinstance(n, fx.Node) for n in arguments["tensors"]):
        return False
    first, second = (
        dict(zip(t, value(n).shape, strict=True)) for t, n in zip(terms, arguments["tensors"], strict=True)
    )
    return all(first[c] == second[c] for c in first.keys() & second)  # a 1 is repeated


def einsum_operand(index: int) -> Callable[..., Factor]:
    """The rule for operand `index` of a two-operand einsum."""

    def einsum(
        g: Tensor, tensors: list[Tensor], *, equation: str, batch_dim: int, shape: torch.Size, dtype: torch.dtype
    ) -> Factor:  # fmt: skip
        terms, out = parse(equation)
        batch, own = out[batch_dim], dict(zip(terms[index], shape, strict=True))
        other, out = terms[1 - index].replace(batch, ""), out.replace(batch, "")
        return _contracted(g, tensors[1 - index].conj(), own, other, out, shape, dtype)

    einsum.__name__ = f"einsum_operand_{index}"
    return einsum


for i in (0, 1):
    register_rule(aten.einsum.default, f"tensors.{i}", when=_two_plain_operands)(einsum_operand(i))
