"""Sums and multiples of parameters, which may be repeated in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.numerics import accumulable
from ...factors import Factor, scaled, summed_to
from ..registry import register_pullback

aten = torch.ops.aten


def to_operand(factor: Factor, by: Any, shape: torch.Size) -> Factor | None:
    """To an operand (*shape) that is multiplied by a number, or by numbers that broadcast with it."""
    if factor.is_replayed:
        return None
    return summed_to(_times(factor, by), tuple(shape))


def _times(factor: Factor, by: Any) -> Factor:
    if not isinstance(by, Tensor):
        return factor if by == 1 else factor.times(by.conjugate())
    return scaled(factor, once(by).conj()) if by.dim() else factor.times(by.conj())


def once(v: Tensor) -> Tensor:
    """Without what is repeated in memory: numbers that are the same along a dimension."""
    for d in range(v.dim()):
        v = v.narrow(d, 0, 1) if v.stride(d) == 0 and v.shape[d] else v
    return v


@register_pullback(
    aten.add.Tensor, aten.sub.Tensor, aten.alias.default, aten.clone.default, aten.contiguous.default,
    aten.expand.default, aten.expand_as.default,
)  # fmt: skip
def _same(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, 1, shape)


@register_pullback(aten.add.Tensor, operand="other")
def _added(factor: Factor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    return to_operand(factor, alpha, shape)


@register_pullback(aten.rsub.Scalar)
@register_pullback(aten.sub.Tensor, operand="other")
def _subtracted(factor: Factor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    return to_operand(factor, -alpha, shape)


@register_pullback(aten.neg.default)
def _negated(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, -1, shape)


@register_pullback(aten.mul.Tensor)
def _multiplied(factor: Factor, other: Any, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, other, shape)


@register_pullback(aten.mul.Tensor, operand="other")
def _multiplied_by(factor: Factor, self: Any, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, self, shape)


@register_pullback(aten.div.Tensor)
def _divided(factor: Factor, other: Any, *, shape: torch.Size) -> Factor | None:
    if isinstance(other, Tensor):  # integers too
        other = once(other).to(accumulable(factor.numbers[:0]).dtype)
    return to_operand(factor, 1 / other, shape)


@register_pullback(aten.div.Tensor, operand="other")
def _divided_by(factor: Factor, self: Tensor, other: Tensor, *, shape: torch.Size) -> Factor | None:
    other = accumulable(other)
    # in this order, as the square of what is divided by may be out of range
    return to_operand(factor, -(self.to(other.dtype) / other) / other, shape)


@register_pullback(aten.masked_fill.Scalar)
def _filled(factor: Factor, mask: Tensor, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, ~mask, shape)


@register_pullback(aten.where.self, aten.where.ScalarOther)
def _chosen(factor: Factor, condition: Tensor, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, condition.bool(), shape)


@register_pullback(aten.where.self, aten.where.ScalarSelf, operand="other")
def _chosen_else(factor: Factor, condition: Tensor, *, shape: torch.Size) -> Factor | None:
    return to_operand(factor, ~condition.bool(), shape)


@register_pullback(aten.tril.default)
def _lower(factor: Factor, self: Tensor, *, diagonal: int) -> Factor | None:
    return to_operand(factor, torch.ones_like(self, dtype=torch.bool).tril(diagonal), self.shape)


@register_pullback(aten.triu.default)
def _upper(factor: Factor, self: Tensor, *, diagonal: int) -> Factor | None:
    return to_operand(factor, torch.ones_like(self, dtype=torch.bool).triu(diagonal), self.shape)
