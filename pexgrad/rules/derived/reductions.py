"""Norms, sums and means of a parameter: of all its numbers, or of those at each place of one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...base.numerics import accumulable
from ...factors import Broadcast, Factor, Lines
from ..registry import register_pullback

aten = torch.ops.aten


def _to_lines(factor: Factor, derivative: Tensor, dims: Sequence[int] | None) -> Factor | None:
    """To what is reduced along `dims`, None or none of them for all, with this derivative (*shape)."""
    shape, reduced = derivative.shape, dims or range(derivative.dim())
    kept = [d for d, n in enumerate(shape) if n != 1 and not {d, d - len(shape)} & set(reduced)]
    if not factor.tensors or derivative.is_complex() or len(kept) > 1:
        return None
    p = factor.summed() if isinstance(factor, Broadcast) else factor.widened().rows().flatten(1)
    return Lines(p, derivative, kept[0] if kept else None, factor.dtype)


@register_pullback(aten.linalg_vector_norm.default)
def _norm(factor: Factor, self: Tensor, *, ord: float, dim: Sequence[int] | None) -> Factor | None:
    if ord != 2 or self.is_complex():
        return None
    w = accumulable(self)
    norm = torch.linalg.vector_norm(w, dim=dim or None, keepdim=True)
    return _to_lines(factor, (w / norm).masked_fill(norm == 0, 0), dim)  # as torch's own


@register_pullback(aten.norm_except_dim.default, operand="v")
def _norm_of_lines(factor: Factor, v: Tensor, *, pow: int, dim: int) -> Factor | None:
    return _norm(
        factor, v, ord=pow, dim=[d for d in range(v.dim()) if d != dim % v.dim()] if dim != -1 else None
    )


@register_pullback(aten.sum.dim_IntList)
def _sum(factor: Factor, self: Tensor, *, dim: Sequence[int] | None) -> Factor | None:
    return _to_lines(factor, torch.ones_like(self), dim)


@register_pullback(aten.sum.default)
def _sum_of_all(factor: Factor, self: Tensor) -> Factor | None:
    return _sum(factor, self, dim=None)


@register_pullback(aten.mean.dim)
def _mean(factor: Factor, self: Tensor, *, dim: Sequence[int] | None) -> Factor | None:
    ones = torch.ones_like(self)
    return _to_lines(factor, ones / (self.numel() / factor.row_numel), dim)


@register_pullback(aten.mean.default)
def _mean_of_all(factor: Factor, self: Tensor) -> Factor | None:
    return _mean(factor, self, dim=None)
