"""Values that are multiples of parameters, number by number: sums, products, masks, functions of each number.

With the value's derivative m in the operand, the operand's factor is m times that of the value, summed where it is repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    return scaled(factor, _once(by).conj()) if by.dim() else factor.times(by.conj())


def _once(v: Tensor) -> Tensor:
    """Without what is repeated in memory: numbers that are the same along a dimension."""
    for d in range(v.dim()):
        v = v.narrow(d, 0, 1) if v.stride(d) == 0 and v.shape[d] else v
    return v


def _register(derivative: Callable[..., Any], *operations: Any, operand: str = "self") -> None:
    """The derivative in an operand as a pullback to it; its parameters are named as a pullback's are."""

    def pullback(factor: Factor, *residuals: Any, shape: torch.Size, **settings: Any) -> Factor | None:
        return to_operand(factor, derivative(*residuals, **settings), shape)

    first, last = (inspect.signature(to_operand).parameters[name] for name in ("factor", "shape"))
    own = inspect.signature(derivative).parameters.values()
    pullback.__signature__ = inspect.Signature([first, *own, last.replace(kind=last.KEYWORD_ONLY)])  # pyright: ignore[reportFunctionMemberAccess]
    register_pullback(*operations, operand=operand)(pullback)


# --- sums, products, masks --------------------------------------------------------------------------

_register(
    lambda: 1,
    aten.add.Tensor, aten.sub.Tensor, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.expand.default,
    aten.expand_as.default,
)  # fmt: skip
_register(lambda: -1, aten.neg.default)
_register(lambda *, alpha: alpha, aten.add.Tensor, operand="other")
_register(lambda *, alpha: -alpha, aten.sub.Tensor, operand="other")
_register(lambda *, alpha: -alpha, aten.rsub.Scalar)
_register(lambda *, beta: beta, aten.addmm.default)
_register(lambda other: other, aten.mul.Tensor)
_register(lambda self: self, aten.mul.Tensor, operand="other")
_register(lambda mask: ~mask, aten.masked_fill.Scalar)
_register(lambda condition: condition.bool(), aten.where.self, aten.where.ScalarOther)
_register(lambda condition: ~condition.bool(), aten.where.self, aten.where.ScalarSelf, operand="other")
_register(lambda self, *, diagonal: _all_of(self).tril(diagonal), aten.tril.default)
_register(lambda self, *, diagonal: _all_of(self).triu(diagonal), aten.triu.default)


def _all_of(v: Tensor) -> Tensor:
    return torch.ones_like(v, dtype=torch.bool)


@register_pullback(aten.div.Tensor)
def _divided(factor: Factor, other: Any, *, shape: torch.Size) -> Factor | None:
    if isinstance(other, Tensor):  # integers too
        other = _once(other).to(accumulable(factor.numbers[:0]).dtype)
    return to_operand(factor, 1 / other, shape)


def _by_divisor(self: Tensor, other: Tensor) -> Tensor:
    other = accumulable(other)
    return -(self.to(other.dtype) / other) / other  # the square of what is divided by may be out of range


_register(_by_divisor, aten.div.Tensor, operand="other")

# --- functions of each number: weights that are kept positive, scales that are learned by their logarithms ---

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


def _at(derivative: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda self: derivative(accumulable(self))


for _operation, _derivative in _DERIVATIVES.items():
    _register(_at(_derivative), _operation)


def _of_softplus(self: Tensor, *, beta: Any, threshold: Any) -> Tensor:
    scaled = accumulable(self) * beta
    return torch.where(scaled > threshold, 1, scaled.sigmoid())


def _of_clamp(self: Tensor, *, min: Any = None, max: Any = None) -> Tensor:
    inside = _all_of(self) if min is None else self >= min
    return inside if max is None else inside & (self <= max)


_register(_of_softplus, aten.softplus.default)
_register(_of_clamp, aten.clamp.default, aten.clip.default)
_register(lambda self, *, min: _of_clamp(self, min=min), aten.clamp_min.default)
_register(lambda self, *, max: _of_clamp(self, max=max), aten.clamp_max.default)


@register_pullback(aten.pow.Tensor_Scalar)
def _power(factor: Factor, self: Tensor, *, exponent: Any, shape: torch.Size) -> Factor | None:
    if not exponent:
        return None
    return to_operand(factor, exponent * accumulable(self) ** (exponent - 1), shape)
