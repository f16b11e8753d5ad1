"""Matrix products with a parameter on either side, and einsum.

    y[..., m, o] = sum_i x[..., m, i] w[..., i, o]        G[b, h, i, o] = sum over t, m of x[b, t, h, m, i] g[b, t, h, m, o]
    y[..., m, o] = sum_i w[..., m, i] x[..., i, o]        G[b, h, m, i] = sum over t, o of g[b, t, h, m, o] x[b, t, h, i, o]

h are the leading dimensions that w has of its own; the leading dimensions along which it is repeated are positions.
Where a matrix is a vector it is given the missing dimension, of size 1, and so is everything where the batch was.
"""

from __future__ import annotations

import math
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


def right(g: Tensor, x: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Outer:
    """The rule for w in y = x w: g (b, t, *rest) and x (b, t, *rest), each without its batch dimension."""
    matrix = tuple(shape) if len(shape) > 1 else (shape[0], 1)
    # the place of the batch among (*lead, m, o); 1 is the last
    from_right = g.dim() - 1 - batch_dim + (len(shape) == 1)
    g = g.unsqueeze(-1) if len(shape) == 1 else g
    g, x = _with_batch(g, from_right), _with_batch(x, from_right)
    return _outer(x, g, matrix, shape, dtype, conjugate_g=True)


def left(g: Tensor, x: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Outer:
    """The rule for w in y = w x."""
    matrix = tuple(shape) if len(shape) > 1 else (1, shape[0])
    from_right = g.dim() - 1 - batch_dim
    if len(shape) == 1:  # y lacks the m of (*lead, m, o)
        g = g.unsqueeze(-1 if from_right == 1 else -2)
        from_right += from_right > 1
    g, x = _with_batch(g, from_right), _with_batch(x, from_right)
    return _outer(g.mT, x.mT, matrix, shape, dtype, conjugate_g=False)


def _with_batch(v: Tensor, from_right: int) -> Tensor:
    """(b, t, *all), with size 1 where the batch was."""
    return v.unsqueeze(v.dim() + 1 - from_right)


def _outer(
    g: Tensor, x: Tensor, matrix: tuple[int, ...], shape: torch.Size, dtype: torch.dtype, *, conjugate_g: bool
) -> Outer:
    """g (b, t, *lead, s, o) and x (b, t, *lead, s, i), whose rows are (b, *heads, o, i)."""
    g, x = (g.conj(), x) if conjugate_g else (g, x.conj())
    g, x = together(g, x)
    n = max(g.dim(), x.dim()) - 4
    lead = torch.broadcast_shapes(_lead(g, n), _lead(x, n))
    g, x = _to_lead(g, lead), _to_lead(x, lead)
    own = (1,) * (n - (len(matrix) - 2)) + matrix[:-2]
    heads = [2 + i for i in range(n) if own[i] != 1]
    repeated = [2 + i for i in range(n) if own[i] == 1]
    order = (0, 1, *repeated, 2 + n, *heads, 3 + n)

    def arranged(v: Tensor) -> Tensor:  # (b, t, h, o)
        v = v.permute(order)
        v = v.flatten(1, 2 + len(repeated))
        return v.flatten(2, -2) if heads else v.unsqueeze(2)

    return Outer(arranged(g), arranged(x), shape, dtype)


def _lead(v: Tensor, n: int) -> tuple[int, ...]:
    return (1,) * (n - (v.dim() - 4)) + tuple(v.shape[2:-2])


def _to_lead(v: Tensor, lead: tuple[int, ...]) -> Tensor:
    v = v[(slice(None), slice(None), *[None] * (len(lead) - (v.dim() - 4)))]
    return v.expand(*v.shape[:2], *lead, *v.shape[-2:])


@register_rule(aten.matmul.default, "self")
def matmul_self(g: Tensor, other: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Outer:
    return left(g, other, batch_dim=batch_dim, shape=shape, dtype=dtype)


@register_rule(aten.matmul.default, "other")
@register_rule(aten.mm.default, "mat2")
@register_rule(aten.bmm.default, "mat2")
def mm_mat2(g: Tensor, self: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Outer:
    return right(g, self, batch_dim=batch_dim, shape=shape, dtype=dtype)


@register_rule(aten.mm.default, "self")
@register_rule(aten.bmm.default, "self")
def mm_self(g: Tensor, mat2: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Outer:
    return left(g, mat2, batch_dim=batch_dim, shape=shape, dtype=dtype)


def _conj(alpha: Any) -> Any:
    return alpha.conjugate() if isinstance(alpha, complex) else alpha


@register_rule(aten.addmm.default, "mat2")
def addmm_mat2(
    g: Tensor, mat1: Tensor, *, alpha: float, batch_dim: int, shape: torch.Size, dtype: torch.dtype
) -> Outer:
    return right(g * _conj(alpha), mat1, batch_dim=batch_dim, shape=shape, dtype=dtype)


@register_rule(aten.addmm.default, "mat1")
def addmm_mat1(
    g: Tensor, mat2: Tensor, *, alpha: float, batch_dim: int, shape: torch.Size, dtype: torch.dtype
) -> Outer:
    return left(g * _conj(alpha), mat2, batch_dim=batch_dim, shape=shape, dtype=dtype)


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
        own, other = terms[index], terms[1 - index]
        batch = out[batch_dim]
        other, out = other.replace(batch, ""), out.replace(batch, "")
        g, x = together(g, tensors[1 - index].conj())
        # letters that only one of the three has: x is summed over them, the row is the same along them
        x, other = _summed(x, other, set(own + out))
        sizes = dict(zip(own, shape, strict=True))

        def shared(with_out: bool, with_other: bool) -> list[str]:
            return [c for c in own if (c in out, c in other) == (with_out, with_other)]

        heads, repeated = shared(True, True), shared(False, False)
        rows, columns = shared(True, False), shared(False, True)
        positions = [c for c in out if c in other and c not in own]

        def arranged(v: Tensor, letters: str, last: list[str]) -> Tensor:  # (b, t, h, o)
            v = v.permute(0, 1, *(2 + letters.index(c) for c in (*positions, *heads, *last)))
            v = v.flatten(1, 1 + len(positions))
            h, o = math.prod(sizes[c] for c in heads), math.prod(sizes[c] for c in last)
            return v.reshape(*v.shape[:2], h, o)

        factor = Outer(arranged(g, out, rows), arranged(x, other, columns), shape, dtype)
        if [*heads, *rows, *columns] == list(own):
            return factor
        if [*heads, *columns, *rows] == list(own):
            return Outer(factor.x, factor.g, shape, dtype)
        made = [*heads, *rows, *columns, *repeated]
        grid, order = tuple(sizes[c] for c in made), tuple(made.index(c) for c in own)
        return Permuted(factor.g, factor.x, shape, dtype, grid, len(repeated), order)

    einsum.__name__ = f"einsum_operand_{index}"
    return einsum


def _summed(x: Tensor, letters: str, kept: set[str]) -> tuple[Tensor, str]:
    gone = [i for i, c in enumerate(letters) if c not in kept]
    return (x.sum([2 + i for i in gone]) if gone else x), "".join(c for c in letters if c in kept)


for i in (0, 1):
    register_rule(aten.einsum.default, f"tensors.{i}", when=_two_plain_operands)(einsum_operand(i))
