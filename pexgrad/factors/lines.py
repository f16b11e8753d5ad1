"""The lines of one matrix, each times a number of the example's: G[b, o, i] = p[b, o] m[o, i].

What normalising a weight adds to its gradient: with that of the weight as it is used, an outer factor, it has inner products in
closed form, <p[b, o] m[o], sum_t g[b, t, o] x[b, t]> = p[b, o] sum_t g[b, t, o] <m[o], x[b, t]>.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.numerics import accumulable, into, square
from ._base import Factor
from .outer import Outer


@dataclass(frozen=True, eq=False)
class Lines(Factor):
    """Of real numbers."""

    p: Tensor  # (b, o)
    m: Tensor  # (o, i), of no example
    dtype: torch.dtype

    tensors = ("p",)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.m.shape)

    def rows(self, out: Tensor | None = None) -> Tensor:
        return into(out, (self.p.unsqueeze(2) * self.m).to(self.dtype))

    def algorithm(self) -> str:
        return "multiples of lines"

    def norm_algorithm(self) -> str:
        return "products of norms"

    def sq_norms(self) -> Tensor:
        return square(accumulable(self.p)) @ self._squares().to(accumulable(self.p[:0]).dtype)

    def _squares(self) -> Tensor:
        return square(accumulable(self.m)).sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        p = accumulable(self.p)
        return ((weights.to(p.dtype) @ p).unsqueeze(1) * self.m).to(self.dtype)

    def dot(self, v: Tensor) -> Tensor:
        along = (accumulable(self.m) * accumulable(v)).sum(1)
        return accumulable(self.p) @ along.to(accumulable(self.p[:0]).dtype)

    def _inner(self, other: Factor) -> Tensor | None:
        along = self._along(other)
        return None if along is None else (accumulable(self.p) * along).sum(1)

    def _gram(self, other: Factor) -> Tensor | None:
        along = self._along(other)
        return None if along is None else accumulable(self.p) @ along.mT

    def _along(self, other: Factor) -> Tensor | None:
        """(c, o): the inner products of the lines with those of the other's rows; None where that takes rows."""
        dtype = accumulable(self.p[:0]).dtype
        if isinstance(other, Lines):
            return accumulable(other.p).to(dtype) * (accumulable(self.m) * accumulable(other.m)).sum(1).to(
                dtype
            )
        if isinstance(other, Outer) and other.g.shape[2] == 1 and tuple(other.shape) == self.shape:
            return along_lines(other, self.m).to(dtype)
        return None


def along_lines(factor: Outer, m: Tensor) -> Tensor:
    """(b, o): the inner products of the lines of an outer factor's rows (o, i) with those of a matrix."""
    g, x = accumulable(factor.g[:, :, 0]), accumulable(factor.x[:, :, 0])
    return (g * (x @ m.to(x.dtype).mT)).sum(1)
