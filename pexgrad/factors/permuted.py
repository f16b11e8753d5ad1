"""An outer factor whose rows have their dimensions in another order, and may be the same along some of them.

G[b, *shape] is an outer factor's row, on a grid (heads, rows, columns), with the grid's dimensions permuted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor

from ..base.numerics import accumulable, into
from ._base import Factor
from .norm_cost import NormCost
from .outer import Outer


@dataclass(frozen=True, eq=False)
class Permuted(Factor):
    """Operands of an einsum in an order of their own."""

    g: Tensor  # (b, t, h, o)
    x: Tensor  # (b, t, h, i)
    shape: tuple[int, ...]
    dtype: torch.dtype
    # the sizes of the outer factor's dimensions, then of so many repeated ones, along which rows are the same
    grid: tuple[int, ...]
    repeated: int
    order: tuple[int, ...]  # the places in the grid of the operand's dimensions

    tensors = "g", "x"

    @property
    def _outer(self) -> Outer:
        return Outer(self.g, self.x, self.grid[: len(self.grid) - self.repeated], self.dtype)

    @property
    def _copies(self) -> int:
        return prod(self.grid[len(self.grid) - self.repeated :])

    def _placed(self, v: Tensor) -> Tensor:
        """(n, *shape) from (n, *grid) without what is repeated."""
        v = v[(..., *[None] * self.repeated)].expand(-1, *self.grid)
        return v.permute(0, *(1 + i for i in self.order))

    def rows(self, out: Tensor | None = None) -> Tensor:
        return into(out, self._placed(self._outer.rows()))

    def algorithm(self) -> str:
        return self._outer.algorithm()

    def norm_cost(self) -> NormCost:
        return self._outer.norm_cost()

    def sq_norms(self) -> Tensor:
        return self._outer.sq_norms() * self._copies

    def squares_of_parts(self, sq: Tensor) -> Tensor:
        return self._outer.squares_of_parts(sq) * self._copies

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._placed(self._outer.weighted_sum(weights).unsqueeze(0)).squeeze(0).contiguous()

    def sum_squares(self) -> Tensor:
        return self._placed(self._outer.sum_squares().unsqueeze(0)).squeeze(0)

    def dot(self, v: Tensor) -> Tensor:
        places = [self.order.index(i) for i in range(len(self.grid))]
        v = accumulable(v).permute(places)
        return self._outer.dot(v.flatten(len(self.grid) - self.repeated).sum(-1) if self.repeated else v)

    def _inner(self, other: Factor) -> Tensor | None:
        return self._outer.inner(other._outer) * self._copies if self._has_grid_of(other) else None

    def _gram(self, other: Factor) -> Tensor | None:
        return self._outer.gram(other._outer) * self._copies if self._has_grid_of(other) else None

    def _has_grid_of(self, other: Factor) -> TypeGuard[Permuted]:
        return isinstance(other, Permuted) and (other.grid, other.repeated, other.order, other.g.shape[2:]) == (
            self.grid, self.repeated, self.order, self.g.shape[2:],
        )  # fmt: skip
