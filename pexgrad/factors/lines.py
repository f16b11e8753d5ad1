"""Fixed numbers m, of which each line along a dimension is multiplied by one number of the example: G[b, o, i] = p[b, o] m[o, i].

What a norm, a mean or a variance of each line of a weight adds to its gradient. With that of the weight as it is used, an outer
factor, it has inner products in closed form, <p[b, o] m[o], sum_t g[b, t, o] x[b, t]> = p[b, o] sum_t g[b, t, o] <m[o], x[b, t]>.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.numerics import accumulable, in_range, into, multiple, square
from ._base import Factor


@dataclass(frozen=True, eq=False)
class Lines(Factor):
    """Of real numbers."""

    p: Tensor  # (b, n)
    m: Tensor  # (*shape), of no example
    dim: int | None  # the dimension of p's n; None where p is one number for all of m
    dtype: torch.dtype

    tensors = ("p",)

    def held(self) -> list[Tensor]:
        return [self.p, self.m]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.m.shape)

    def rows(self, out: Tensor | None = None) -> Tensor:
        return into(out, (self._placed(self.p) * self.m).to(self.dtype))

    def _placed(self, p: Tensor) -> Tensor:
        """(b, *shape), but for what is repeated, from p (b, n)."""
        return p.reshape(p.shape[0], *(p.shape[1] if d == self.dim else 1 for d in range(self.m.dim())))

    def scaled(self, m: Tensor) -> Lines:
        return replace(self, m=multiple(accumulable(self.m), m))

    def algorithm(self) -> str:
        return "multiples of lines"

    def norm_algorithm(self) -> str:
        return "products of norms"

    def sq_norms(self) -> Tensor:
        squares = square(in_range(self.p)) @ self._sums(square(in_range(self.m)))
        return squares.to(self._wide.dtype)

    @property
    def _wide(self) -> Tensor:
        return accumulable(self.p)

    def _sums(self, v: Tensor) -> Tensor:
        """(n,): the sums of v (*shape) at each place of the dimension."""
        v = v.reshape(1, -1) if self.dim is None else v.movedim(self.dim, 0).flatten(1)
        return v.sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        p = (weights.to(self._wide.dtype) @ self._wide).unsqueeze(0)
        return (self._placed(p)[0] * self.m).to(self.dtype)

    def dot(self, v: Tensor) -> Tensor:
        return self._wide @ self._sums(accumulable(self.m) * accumulable(v)).to(self._wide.dtype)

    def dots_along(self, m: Tensor, dim: int) -> Tensor | None:
        if self.dim != dim:
            return None
        return self._wide * self._sums(accumulable(self.m) * accumulable(m)).to(self._wide.dtype)

    def _inner(self, other: Factor) -> Tensor | None:
        along = self._along(other)
        return None if along is None else (self._wide * along).sum(1)

    def _gram(self, other: Factor) -> Tensor | None:
        along = self._along(other)
        return None if along is None else self._wide @ along.mT

    def _along(self, other: Factor) -> Tensor | None:
        """(c, n): the inner products of the slices of the other's rows with those of m; None where that takes rows."""
        if tuple(other.shape) != self.shape:
            return None
        m = accumulable(self.m)
        along = other.dot(m).unsqueeze(1) if self.dim is None else other.dots_along(m, self.dim)
        return None if along is None else along.to(self._wide.dtype)
