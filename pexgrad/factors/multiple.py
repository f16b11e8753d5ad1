"""A multiple, elementwise, of another factor: G[b] = m * H[b], as of a weight under a mask.

    |G_b|^2 = sum over o, i of g[b, o]^2 m[o, i]^2 x[b, i]^2

where H[b] = g[b] (x) x[b] is an outer factor of one position; of more positions it takes the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from ..base.numerics import accumulable, in_range, into, is_half, is_inexact, may_write, multiple, square
from ._base import Factor
from .conv import Conv
from .norm_cost import NormCost
from .outer import Outer


def scaled(factor: Factor, m: Tensor) -> Factor:
    """The factor whose rows are those of another, times `m`, which broadcasts to them."""
    own = factor.scaled(m)
    if own is not None:
        return own
    m = m if is_inexact(m) or m.dtype == torch.bool else m.to(factor.dtype)
    return Multiple(factor, accumulable(m).expand(factor.shape))


@dataclass(frozen=True, eq=False)
class Multiple(Factor):
    """Masked weights, elementwise functions of weights."""

    factor: Factor
    m: Tensor  # (*shape), of no example: numbers, or a mask

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.factor.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.factor.dtype

    @property
    def numbers(self) -> Tensor:
        return self.factor.numbers

    def held(self) -> list[Tensor]:
        return [*self.factor.held(), self.m]

    def mapped(self, f: Callable[[Tensor], Tensor]) -> Multiple:
        return replace(self, factor=self.factor.mapped(f))

    def times(self, number: object) -> Multiple:
        return replace(self, factor=self.factor.times(number))

    def widened(self) -> Multiple:
        return replace(self, factor=self.factor.widened())

    def balanced(self) -> Multiple:
        return replace(self, factor=self.factor.balanced())

    def scaled(self, m: Tensor) -> Multiple:
        return replace(self, m=multiple(self.m, m) if self.m.dtype != torch.bool else multiple(m, self.m))

    def rows(self, out: Tensor | None = None) -> Tensor:
        if is_half(self.dtype):
            return into(out, multiple(self.factor.widened().rows(), self.m).to(self.dtype))
        rows = self.factor.rows(out)
        own = rows is out or isinstance(self.factor, Outer | Conv)  # and nobody else's
        if not own or not may_write(rows, self.m):
            return into(out, multiple(rows, self.m))
        return rows.masked_fill_(~self.m, 0) if self.m.dtype == torch.bool else rows.mul_(self.m)

    def algorithm(self) -> str:
        return self.factor.algorithm()

    def norm_cost(self) -> NormCost | None:
        cost = self.factor.norm_cost()  # positions cannot be taken in pairs
        return cost if cost is None or cost.is_product else cost._replace(gram=cost.rows)

    def sq_norms(self) -> Tensor:
        return _squares(self.factor, self.m) if _is_product(self.factor) else super().sq_norms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return multiple(self.factor.widened().weighted_sum(weights), self.m).to(self.dtype)

    def sum_squares(self) -> Tensor:
        return multiple(self.factor.sum_squares(), self.m if self.m.dtype == torch.bool else square(self.m))

    def dot(self, v: Tensor) -> Tensor:
        return self.factor.dot(multiple(accumulable(v), self.m.conj()))

    def dots_along(self, m: Tensor, dim: int) -> Tensor | None:
        return self.factor.dots_along(multiple(accumulable(m), self.m), dim)


def _is_product(factor: Factor) -> TypeGuard[Outer]:
    return isinstance(factor, Outer) and factor.g.shape[1] == 1


def _squares(outer: Outer, m: Tensor) -> Tensor:
    """(b,): of outer products of one position times m, in float64, whose range does as well as balancing."""
    own = accumulable(outer.g[:0]).dtype
    if in_range(outer.g[:0]).dtype == own:
        outer = outer.balanced()
    g, x = (square(in_range(v[:, 0])).movedim(1, 0) for v in (outer.g, outer.x))  # (h, b, o), (h, b, i)
    squares = square(in_range(m)).reshape(g.shape[0], g.shape[2], x.shape[2])
    return ((g @ squares) * x).sum((0, 2)).to(own.to_real())
