"""Products of matrices of parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...base.numerics import accumulable
from ...factors import Broadcast, Factor, Outer
from ..registry import register_pullback
from .multiples import to_operand

aten = torch.ops.aten


def _takes(factor: Factor, shape: torch.Size, other: Tensor, inner: int) -> TypeGuard[Outer]:
    """Whether to pull it back through a product with `other`, over `inner` numbers, costs less than to build its rows."""
    if not isinstance(factor, Outer) or not factor.is_of_matrices:
        return False
    if not shape[:-2] == other.shape[:-2] == tuple(factor.shape[:-2]):  # one is repeated for each head
        return False
    t, o, i = factor.g.shape[1], factor.g.shape[3], factor.x.shape[3]
    return t * inner * (o + i) <= o * i * (t / 2 + inner)


@register_pullback(aten.mm.default, aten.bmm.default)
def _first(factor: Factor, mat2: Tensor, *, shape: torch.Size) -> Factor | None:
    """To u (..., o, r) in u v."""
    if not _takes(factor, shape, mat2, mat2.shape[-2]):
        return None
    wide = factor.mapped(accumulable)
    return replace(wide, x=_times_matrix(wide.x, mat2.mT), shape=tuple(shape))


@register_pullback(aten.mm.default, aten.bmm.default, operand="mat2")
@register_pullback(aten.matmul.default, operand="other")
def _second(factor: Factor, self: Tensor, *, shape: torch.Size) -> Factor | None:
    """To v (..., r, i) in u v."""
    if not _takes(factor, shape, self, self.shape[-1]):
        return None
    wide = factor.mapped(accumulable)
    return replace(wide, g=_times_matrix(wide.g, self), shape=tuple(shape))


def _times_matrix(v: Tensor, m: Tensor) -> Tensor:
    """(b, t, h, r) from v (b, t, h, f) and a matrix (f, r), or one (h, f, r) for each head, conjugated."""
    return torch.einsum("bthf,hfr->bthr", v, m.to(v.dtype).conj().reshape(-1, *m.shape[-2:]))


@register_pullback(aten.matmul.default)
def _matmul_first(factor: Factor, other: Tensor, *, shape: torch.Size) -> Factor | None:
    return _mapped(factor, other, shape) if other.dim() == 1 else _first(factor, other, shape=shape)


@register_pullback(aten.addmm.default, operand="mat1")
def _addmm_first(factor: Factor, mat2: Tensor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    first = _first(factor, mat2, shape=shape)
    return None if first is None else to_operand(first, alpha, shape)


@register_pullback(aten.addmm.default, operand="mat2")
def _addmm_second(factor: Factor, mat1: Tensor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    second = _second(factor, mat1, shape=shape)
    return None if second is None else to_operand(second, alpha, shape)


def _mapped(factor: Factor, vec: Tensor, shape: torch.Size) -> Factor | None:
    """To the matrix in a matrix times a vector."""
    if not isinstance(factor, Broadcast) or len(shape) != 2 or vec.is_complex():
        return None
    g = factor.summed().to(vec.dtype)[:, None, None]  # (b, 1, 1, o)
    return Outer(g, vec.expand(g.shape[0], 1, 1, -1), tuple(shape), factor.dtype)


@register_pullback(aten.dot.default, aten.vdot.default, operand="other")
def _dotted(factor: Factor, self: Tensor, *, shape: torch.Size) -> Factor | None:
    if not isinstance(factor, Broadcast) or self.is_complex():
        return None
    return Broadcast(factor.summed()[:, None] * self, None, tuple(shape), factor.dtype)


@register_pullback(aten.dot.default, aten.vdot.default)
def _dotted_with(factor: Factor, other: Tensor, *, shape: torch.Size) -> Factor | None:
    return _dotted(factor, other, shape=shape)
