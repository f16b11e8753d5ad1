"""The broadcast factor: row b is the sum over positions of g[b] * r[b].

G[b, f] = sum_t g[b, t, f] r[b, t, f]        r = 1 where it is None
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..base.numerics import accumulable, into, multiple
from ._base import Factor


@dataclass(frozen=True, eq=False)
class Broadcast(Factor):
    """Biases, scales and shifts of norms, parameters expanded over the batch."""

    g: Tensor  # (b, t, f)
    r: Tensor | None  # (b, t, f)
    shape: tuple[int, ...]  # numel = f
    dtype: torch.dtype

    tensors = "g", "r"

    def rows(self, out: Tensor | None = None) -> Tensor:
        rows = self.summed().reshape(self.batch, *self.shape).to(self.dtype)
        # never the cotangent itself, which may be another's rows too, or a tensor of the user's
        return rows.clone() if out is None and self.r is None and self.g.shape[1] == 1 else into(out, rows)

    def summed(self, dtype: torch.dtype | None = None) -> Tensor:
        """(b, f): the sum over positions, in another dtype where one is given."""
        product = self.g if self.r is None else self.g * self.r
        summed = product[:, 0] if product.shape[1] == 1 else product.sum(1, dtype=dtype)
        return summed if dtype is None else summed.to(dtype)

    def scaled(self, m: Tensor) -> Broadcast:
        return replace(self, g=multiple(self.g, m.expand(self.shape).reshape(-1)))

    def settled(self) -> Broadcast:
        if self.g.shape[1] == 1:
            return self
        return replace(self, g=self.summed(accumulable(self.g[:0]).dtype).unsqueeze(1), r=None)

    def algorithm(self) -> str:
        return "sum over positions"

    def keeps_rows(self) -> bool:
        return True  # they are no larger than what they are summed from


def repeats_as_positions(v: Tensor, own: Sequence[int]) -> Tensor:
    """(b, t, f) from (b, t, *rest), where an operand (*own) is repeated along the dimensions of `rest` in which they differ."""
    repeated = [2 + i for i, (n, m) in enumerate(zip(own, v.shape[2:], strict=True)) if n != m]
    kept = [2 + i for i in range(len(own)) if 2 + i not in repeated]
    v = v.permute(0, 1, *repeated, *kept).flatten(1, 1 + len(repeated))
    return v.reshape(*v.shape[:2], prod(own))


def summed_to(factor: Factor, shape: tuple[int, ...]) -> Factor | None:
    """The factor whose rows are those of another, summed to (*shape) as broadcasting repeats it; None where that takes rows."""
    if tuple(factor.shape) == shape:
        return factor
    own = (1,) * (len(factor.shape) - len(shape)) + shape
    if isinstance(factor, Broadcast):
        whole = factor.shape
        return replace(factor.mapped(lambda v: repeats_as_positions(v.unflatten(2, whole), own)), shape=shape)
    sums = _sums(factor, own)
    return None if sums is None else Broadcast(sums.unsqueeze(1), None, shape, factor.dtype)


def _sums(factor: Factor, own: tuple[int, ...]) -> Tensor | None:
    """(b, n): one for each place of a dimension, or one of all; None where there are several dimensions."""
    kept = [d for d, n in enumerate(own) if n != 1]
    if factor.is_replayed or factor.dtype.is_complex or len(kept) > 1:
        return None
    ones = factor.numbers.new_ones(()).expand(factor.shape)
    if not kept:
        return factor.dot(ones).unsqueeze(1)
    return factor.dots_along(ones, kept[0]) if own[kept[0]] == factor.shape[kept[0]] else None
