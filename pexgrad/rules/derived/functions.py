"""Functions of each number of a parameter: weights that are kept positive, scales that are learned by their logarithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.numerics import accumulable
from ...factors import Factor
from ..registry import register_pullback
from .sums import to_operand

aten = torch.ops.aten

_DERIVATIVES: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.exp.default: torch.exp,
    aten.log.default: torch.reciprocal,
    aten.sqrt.default: lambda w: 0.5 * w.rsqrt(),
    aten.rsqrt.default: lambda w: -0.5 * w.rsqrt() ** 3,
    aten.reciprocal.default: lambda w: -(w.reciprocal() ** 2),
    aten.square.default: lambda w: 2 * w,
    aten.tanh.default: lambda w: 1 - w.tanh() ** 2,
    aten.sigmoid.default: lambda w: w.sigmoid() * (1 - w.sigmoid()),
    aten.abs.default: torch.sgn,
    aten.relu.default: lambda w: w > 0,
    aten.sin.default: torch.cos,
    aten.cos.default: lambda w: -w.sin(),
}


def _by(derivative: Callable[[Tensor], Tensor]) -> Callable[..., Factor | None]:
    def pullback(factor: Factor, self: Tensor) -> Factor | None:
        return to_operand(factor, derivative(accumulable(self)), self.shape)

    return pullback


for _operation, _derivative in _DERIVATIVES.items():
    register_pullback(_operation)(_by(_derivative))


@register_pullback(aten.pow.Tensor_Scalar)
def _power(factor: Factor, self: Tensor, *, exponent: Any) -> Factor | None:
    return (
        to_operand(factor, exponent * accumulable(self) ** (exponent - 1), self.shape) if exponent else None
    )


@register_pullback(aten.softplus.default)
def _softplus(factor: Factor, self: Tensor, *, beta: Any, threshold: Any) -> Factor | None:
    scaled = accumulable(self) * beta
    return to_operand(factor, torch.where(scaled > threshold, 1, scaled.sigmoid()), self.shape)


@register_pullback(aten.clamp.default, aten.clip.default)
def _clamped(factor: Factor, self: Tensor, *, min: Any, max: Any) -> Factor | None:
    inside = torch.ones_like(self, dtype=torch.bool)
    inside = inside if min is None else inside & (self >= min)
    return to_operand(factor, inside if max is None else inside & (self <= max), self.shape)


@register_pullback(aten.clamp_min.default)
def _from_below(factor: Factor, self: Tensor, *, min: Any) -> Factor | None:
    return _clamped(factor, self, min=min, max=None)


@register_pullback(aten.clamp_max.default)
def _from_above(factor: Factor, self: Tensor, *, max: Any) -> Factor | None:
    return _clamped(factor, self, min=None, max=max)
