"""Norms, sums and means of a parameter: of all its numbers, or of those at each place of one dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...base.numerics import accumulable, flat
from ...factors import Broadcast, Factor, Lines
from ..registry import register_pullback

aten = torch.ops.aten


def _to_lines(factor: Factor, derivative: Tensor, dims: Sequence[int] | None) -> Factor | None:
    """To what is reduced along `dims`, None or none of them for all, with this derivative (*shape)."""
    shape, reduced = derivative.shape, dims or range(derivative.dim())
    kept = [d for d, n in enumerate(shape) if n != 1 and not {d, d - len(shape)} & set(reduced)]
    if factor.is_replayed or derivative.is_complex() or len(kept) > 1:
        return None
    p = factor.summed() if isinstance(factor, Broadcast) else flat(factor.widened().rows())
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
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    return _norm(factor, v, ord=pow, dim=None if dim == -1 else others)  # -1 leaves none out


@register_pullback(aten.sum.dim_IntList)
def _sum(factor: Factor, self: Tensor, *, dim: Sequence[int] | None) -> Factor | None:
    return _to_lines(factor, self.new_ones(()).expand(self.shape), dim)


@register_pullback(aten.mean.dim)
def _mean(factor: Factor, self: Tensor, *, dim: Sequence[int] | None) -> Factor | None:
    part = accumulable(self).new_full((), factor.row_numel / max(1, self.numel()))
    return _to_lines(factor, part.expand(self.shape), dim)


register_pullback(aten.sum.default)(lambda factor, self: _sum(factor, self, dim=None))
register_pullback(aten.mean.default)(lambda factor, self: _mean(factor, self, dim=None))


def _deviations(w: Tensor, dim: Sequence[int] | None, correction: float | None) -> tuple[Tensor, float]:
    """From the mean, and by what their squares are divided."""
    w = accumulable(w)
    mean = w.mean(tuple(dim or range(w.dim())), keepdim=True)
    return w - mean, w.numel() / max(1, mean.numel()) - (1 if correction is None else correction)


@register_pullback(aten.var.correction)
def _variance(
    factor: Factor, self: Tensor, *, dim: Sequence[int] | None, correction: float | None
) -> Factor | None:
    deviations, n = _deviations(self, dim, correction)
    return _to_lines(factor, 2 * deviations / n, dim)


@register_pullback(aten.std.correction)
def _spread(
    factor: Factor, self: Tensor, *, dim: Sequence[int] | None, correction: float | None
) -> Factor | None:
    deviations, n = _deviations(self, dim, correction)
    spread = (deviations.square().sum(tuple(dim or range(self.dim())), keepdim=True) / n).sqrt()
    return _to_lines(factor, (deviations / (spread * n)).masked_fill(spread == 0, 0), dim)  # as torch's own


def _with_older_arguments(of: Callable[..., Factor | None], all_of_it: OpOverload, along: OpOverload) -> None:
    """Register it for the forms that know two corrections only."""

    @register_pullback(all_of_it)
    def _(factor: Factor, self: Tensor, *, unbiased: bool) -> Factor | None:
        return of(factor, self, dim=None, correction=int(unbiased))

    @register_pullback(along)
    def _(factor: Factor, self: Tensor, *, dim: Sequence[int] | None, unbiased: bool) -> Factor | None:
        return of(factor, self, dim=dim, correction=int(unbiased))


_with_older_arguments(_variance, aten.var.default, aten.var.dim)
_with_older_arguments(_spread, aten.std.default, aten.std.dim)
