"""What every factor offers. A factor is a dataclass that names its tensors and implements `rows`; the rest follows from
these in bounded memory, and may be replaced where there is a faster way.

Axes: b batch, t positions, then the operand's own. For a factor with rows G (b, *shape):

    sq_norms       |G_b|^2
    weighted_sum   sum_b w_b G_b
    sum_squares    sum_b |G_b|^2, elementwise
    dot            <G_b, v>
    dots_along     <G_b, v> of each slice along a dimension
    inner          <G_b, H_b> with another factor's rows H
    gram           <G_b, H_c>
    scaled         m G_b, elementwise, as a factor
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..base.doubts import may_ask
from ..base.numerics import (
    accumulable,
    dots,
    gather,
    in_range,
    is_half,
    is_inexact,
    products,
    square,
    squared_norms,
    total,
)
from ..base.trees import runs
from .norm_cost import GRAM, ROWS, NormCost

if TYPE_CHECKING:
    from typing_extensions import Self

# what a default may materialise at a time: small against any model, large enough to be efficient
PIECE_BYTES = 1 << 23
# rows on either side of a product of all with all, for which they are built again and again
BLOCK_BYTES = 1 << 26


class Factor(ABC):
    """The per-example gradient of one use of one operand, not yet multiplied out."""

    shape: tuple[int, ...]  # the operand's shape
    dtype: torch.dtype  # the operand's dtype, which rows have

    # the fields that hold tensors (b, ...); one may be None, but not the first
    tensors: ClassVar[tuple[str, ...]]
    adds_in_place: ClassVar[bool] = False  # whether `add_to` builds no rows
    is_replayed: ClassVar[bool] = False  # whether it is the fallback, which has no tensors of its own

    @abstractmethod
    def rows(self, out: Tensor | None = None) -> Tensor:
        """(b, *shape), written into `out` where that is given."""

    @property
    def batch(self) -> int:
        """The number of examples."""
        return self.numbers.shape[0]

    @property
    def numbers(self) -> Tensor:
        """Its first tensor, which tells dtype and device of what is computed from it."""
        return getattr(self, self.tensors[0])

    def held(self) -> list[Tensor]:
        """Every tensor that it reads."""
        return [v for v in (getattr(self, name) for name in self.tensors) if v is not None]

    def mapped(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The same with `f` of each of its tensors."""
        values = {name: getattr(self, name) for name in self.tensors}
        return replace(self, **{name: f(v) for name, v in values.items() if v is not None})  # pyright: ignore[reportArgumentType]

    def times(self, number: Any) -> Self:
        """The same with every row times a number."""
        name = self.tensors[0]
        return replace(self, **{name: getattr(self, name) * number})  # pyright: ignore[reportArgumentType]

    def take(self, s: slice) -> Self:
        """The same for the examples of a slice."""
        return self.mapped(lambda v: v[s])

    def scaled(self, m: Tensor) -> Factor | None:
        """The same with every row times `m`, which broadcasts to (*shape); None where it is then of another kind."""
        return None

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return prod(self.shape)

    def algorithm(self) -> str:
        """How rows are computed, for the reader of `explain`."""
        return type(self).__name__.lower()

    def norm_cost(self) -> NormCost | None:
        """What the ways to norms cost, where there are several."""
        return None

    def norm_algorithm(self) -> str:
        """How norms are computed, for the reader of `explain`."""
        cost = self.norm_cost()
        return ROWS if cost is None else cost.way

    def keeps_rows(self) -> bool:
        """Whether a norm followed by a weighted sum is cheaper through rows that are kept in between."""
        cost = self.norm_cost()
        return cost is not None and cost.keeps_rows

    def slices(self, bytes_of_example: int, limit: int | None = None) -> Iterator[slice]:
        """The batch in runs of examples that together take about `limit` bytes, or `PIECE_BYTES`."""
        return slices(self.batch, bytes_of_example, limit)

    def pieces(self, limit: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Rows, a bounded number of examples at a time."""
        for s in self.slices(self.row_numel * self.dtype.itemsize, limit):
            yield s, self.take(s).rows()

    def widened(self) -> Self:
        """The same, with rows of half precision in float32, as they might overflow before they are added up."""
        if not self.tensors or not is_half(self.dtype):
            return self
        return replace(self.mapped(accumulable), dtype=torch.float32)  # pyright: ignore[reportArgumentType]

    def settled(self) -> Factor:
        """The same in less memory, where making it so takes no further work."""
        return self

    def balanced(self) -> Self:
        """The same rows, from tensors whose squares are in range wherever those of the rows are."""
        return self

    def for_products(self) -> Self:
        """The same rows, from tensors fit for inner products: in float64 where nobody can ask whether these cancel."""
        held = self.held()
        if held and not may_ask(held[0]):
            wide = self.mapped(lambda v: in_range(v) if is_inexact(v) else v)
            if wide.held()[0].dtype != held[0].dtype:
                return wide
        return self.balanced()

    def add_to(self, rows: Tensor) -> None:
        """Add rows to those given, (b, *shape)."""
        for s, g in self.pieces():
            rows[s] += g

    def sq_norms(self) -> Tensor:
        """(b,): the squared norm of each row, accumulated in at least float32."""
        if self.sums_products:
            own = self.for_products()
            return own.inner(own).to(accumulable(self.numbers[:0]).dtype.to_real())
        return self.sq_norms_by_rows()

    def sq_norms_by_rows(self) -> Tensor:
        """(b,): the same, of the rows themselves."""
        return gather([squared_norms(g) for _, g in self.widened().pieces()])

    @property
    def sums_products(self) -> bool:
        """Whether squared norms are sums of inner products, which may cancel."""
        return self.norm_algorithm() == GRAM

    def squares_of_parts(self, sq: Tensor) -> Tensor:
        """(b,): the sum of the squared norms of the parts that a row is the sum of; `sq` are the squared norms of whole rows."""
        return sq

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(*shape): sum over b of weights[b] times row b."""
        parts = ((weights[s], accumulable(g)) for s, g in self.widened().pieces())
        return total(torch.tensordot(w.to(g.dtype), g, 1) for w, g in parts).to(self.dtype)

    def sum_squares(self) -> Tensor:
        """(*shape): sum over b of the squared modulus of row b, elementwise."""
        return total(square(accumulable(g)).sum(0) for _, g in self.widened().pieces())

    def dot(self, v: Tensor) -> Tensor:
        """(b,): the inner product of each row with `v` (*shape)."""
        direction = v.unsqueeze(0)
        return gather([products(g, direction) for _, g in self.widened().pieces()]).squeeze(1)

    def dots_along(self, m: Tensor, dim: int) -> Tensor | None:
        """(b, n): the inner products of a row's slices along a dimension with those of `m` (*shape), real numbers.

        None where this kind of factor knows no way without the rows.
        """
        return None

    def inner(self, other: Factor) -> Tensor:
        """(b,): the inner product of each row with the same example's row of `other`."""
        for a, b in ((self, other), (other, self)):
            if (found := a._inner(b)) is not None:
                return found
        return gather([dots(g, other.widened().take(s).rows()) for s, g in self.widened().pieces()])

    def _inner(self, other: Factor) -> Tensor | None:
        """The same where this kind of factor knows a way without the rows; None elsewhere."""
        return None

    def gram(self, other: Factor) -> Tensor:
        """(b, c): the inner products of all rows with all rows of `other`."""
        if (found := self._gram(other)) is not None:
            return found
        if (found := other._gram(self)) is not None:
            return found.mT
        return self._gram_by_rows(other)

    def _gram(self, other: Factor) -> Tensor | None:
        """The same where this kind of factor knows a way without the rows; None elsewhere."""
        return None

    def _gram_by_rows(self, other: Factor) -> Tensor:
        lines, other = [], other.widened()
        for _, g in self.widened().pieces(BLOCK_BYTES):
            lines.append(torch.cat([products(g, h) for _, h in other.pieces(BLOCK_BYTES)], 1))
        return gather(lines)


def slices(batch: int, bytes_of_example: int, limit: int | None = None) -> Iterator[slice]:
    """A batch in runs of examples that together take about `limit` bytes, or `PIECE_BYTES`."""
    if isinstance(batch, torch.SymInt):  # a graph for every batch size has no loop over it
        yield slice(0, batch)
        return
    yield from runs(batch, max(1, (limit or PIECE_BYTES) // max(1, bytes_of_example)))
