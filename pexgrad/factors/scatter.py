"""The scatter factor: g[b,t] is added at row id[b,t] of a table.

    G[b, v, :] = sum over t with id[b, t] = v of g[b, t, :]

Nothing of the table's size is built, except by `rows`. With the head of a language model that shares the table, an
outer factor with rows sum_t g'[b, t, v] x[b, t, :], the inner product is sum over t, u of g'[b, t, id[b, u]] <x[b, t], g[b, u]>.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base.fakes import is_recorded
from ..base.numerics import accumulable, gather, into, may_write, multiple, real, square, weighted
from ._base import Factor
from .outer import Outer


@dataclass(frozen=True, eq=False)
class Scatter(Factor):
    """Embeddings and indexed parameters."""

    g: Tensor  # (b, t, f)
    ids: Tensor  # (b, t), in [0, v)
    shape: tuple[int, ...]  # (v, *rest), numel of rest = f
    dtype: torch.dtype

    tensors = "g", "ids"
    adds_in_place = True

    def rows(self, out: Tensor | None = None) -> Tensor:
        g = self.g
        narrows = self.dtype.itemsize < g.dtype.itemsize  # then it is added up before it is rounded
        if narrows or not may_write(g):
            table = g.new_zeros(self.batch * self.shape[0], g.shape[2])
            table = table.index_add(0, self._keys(), g.flatten(0, 1))
            return into(out, table.reshape(self.batch, *self.shape).to(self.dtype))
        rows = g.new_zeros(self.batch, *self.shape, dtype=self.dtype) if out is None else out.zero_()
        self.add_to(rows)
        return rows

    def add_to(self, rows: Tensor) -> None:
        if not rows.is_contiguous():
            return super().add_to(rows)
        g = self.g.flatten(0, 1).to(rows.dtype)
        rows.view(-1, g.shape[1]).index_add_(0, self._keys(), g)

    def _keys(self) -> Tensor:
        """(b t): row id[b, t] of example b, in a table of the rows of all examples."""
        first = torch.arange(self.batch, device=self.ids.device)[:, None] * self.shape[0]
        return (first + self.ids).flatten()

    def scaled(self, m: Tensor) -> Scatter:
        return replace(self, g=multiple(accumulable(self.g), self._looked_up(m)))

    def dots_along(self, m: Tensor, dim: int) -> Tensor | None:
        if dim != 0:
            return None
        dots = (accumulable(self.g) * self._looked_up(m)).sum(2)
        return dots.new_zeros(self.batch, self.shape[0]).scatter_add(1, self.ids, dots)

    def _looked_up(self, m: Tensor) -> Tensor:
        """(b, t, f): the rows of m, which broadcasts to (*shape), that the ids name."""
        return m.expand(self.shape).flatten(1)[self.ids]

    def algorithm(self) -> str:
        return "scatter-add"

    def norm_algorithm(self) -> str:
        return "sums over equal ids"

    def sq_norms(self) -> Tensor:
        if is_recorded(self.ids):
            return self._sq_norms_of_pairs()
        g = accumulable(self.g).flatten(0, 1)
        distinct, place = torch.unique(self._keys(), return_inverse=True)
        sums = g.new_zeros(len(distinct), g.shape[1]).index_add(0, place, g)
        of_key = square(sums).sum(1)
        return of_key.new_zeros(self.batch).index_add(0, distinct // self.shape[0], of_key)

    def _sq_norms_of_pairs(self) -> Tensor:
        """The same where no shape may depend on the ids: at every position the sum for its id, counted once in all."""
        same = (self.ids[:, :, None] == self.ids[:, None, :]).to(accumulable(self.g[:0]).dtype)  # (b, t, t)
        sums = same @ accumulable(self.g)
        return (square(sums).sum(2) / same.sum(2).real).sum(1)

    def squares_of_parts(self, sq: Tensor) -> Tensor:
        return square(accumulable(self.g)).flatten(1).sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = weighted(self.g, weights)
        table = g.new_zeros(self.shape[0], g.shape[2])
        # in place: a copy of the table may be all the memory that is used
        add = table.index_add if is_recorded(g) else table.index_add_
        return add(0, self.ids.flatten(), g.flatten(0, 1)).reshape(self.shape).to(self.dtype)

    def dot(self, v: Tensor) -> Tensor:
        table = accumulable(v).conj().reshape(self.shape[0], -1)
        return real(table[self.ids] * accumulable(self.g)).flatten(1).sum(1)

    def _inner(self, other: Factor) -> Tensor | None:
        if (pairs := self._pairs_with(other)) is None:
            return None
        return gather([pairs(self.take(s), other.take(s)) for s in self.slices(self._bytes_of_pairs(other))])

    def _gram(self, other: Factor) -> Tensor | None:
        if (pairs := self._pairs_with(other)) is None:
            return None
        lines, pieces = [], [*other.slices(self._bytes_of_pairs(other))]
        for b in range(self.batch):  # expanded to a piece of the other batch at a time
            one = self.take(slice(b, b + 1))
            lines.append(gather([pairs(one._expanded(s.stop - s.start), other.take(s)) for s in pieces]))
        return torch.stack(lines) if lines else self.g.new_zeros(0, other.batch)

    def _expanded(self, batch: int) -> Scatter:
        return replace(self, g=self.g.expand(batch, -1, -1), ids=self.ids.expand(batch, -1))

    def _pairs_with(self, other: Factor) -> Callable[[Scatter, Any], Tensor] | None:
        """How inner products (b,) with another table's rows, or with those of a head, go by pairs of positions."""
        if isinstance(other, Scatter):
            return Scatter._pairs
        is_head = isinstance(other, Outer) and other.g.shape[2] == 1 and other.g.shape[3] == self.shape[0]
        return Scatter._head if is_head else None

    def _bytes_of_pairs(self, other: Factor) -> int:
        return self.ids.shape[1] * other.numbers.shape[1] * 8

    def _pairs(self, other: Scatter) -> Tensor:
        same = self.ids[:, :, None] == other.ids[:, None, :]  # (b, t, u)
        return (same * real(accumulable(self.g) @ accumulable(other.g).mH)).sum((1, 2))

    def _head(self, head: Outer) -> Tensor:
        g, x = accumulable(head.g[:, :, 0]), accumulable(head.x[:, :, 0])  # (b, t, v), (b, t, f)
        ids = self.ids[:, None, :].expand(-1, g.shape[1], -1)
        return real(g.gather(2, ids) * (x @ accumulable(self.g).mH)).sum((1, 2))
