"""What every factor offers. A factor implements `rows` and `narrow`; the rest follows from them in bounded memory.

Axes: b batch, t positions, then the operand's own. For a factor with rows G (b, *shape):

    sq_norms       |G_b|^2
    weighted_sum   sum_b w_b G_b
    sum_squares    sum_b |G_b|^2, elementwise
    dot            <G_b, v>
    inner          <G_b, H_b> with another factor's rows H
    gram           <G_b, H_c>
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .norm_cost import NormCost

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

    adds_in_place = False  # whether `add_to` builds no rows

    @property
    @abstractmethod
    def batch(self) -> int:
        """The number of examples."""

    @abstractmethod
    def rows(self, out: Tensor | None = None) -> Tensor:
        """(b, *shape), written into `out` where that is given."""

    @abstractmethod
    def narrow(self, start: int, length: int) -> Factor:
        """The same for some of the examples."""

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
        return "rows in pieces" if cost is None else cost.way

    def keeps_rows(self) -> bool:
        """Whether a norm followed by a weighted sum is cheaper through rows that are kept in between."""
        cost = self.norm_cost()
        return cost is not None and cost.keeps_rows

    def slices(self, bytes_of_example: int, limit: int | None = None) -> Iterator[slice]:
        """The batch in runs of examples that together take about `limit` bytes, or `PIECE_BYTES`."""
        return slices(self.batch, bytes_of_example, limit)

    def take(self, s: slice) -> Self:
        """The same for the examples of a slice."""
        return self.narrow(s.start, s.stop - s.start)  # pyright: ignore[reportReturnType]

    def pieces(self, limit: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Rows, a bounded number of examples at a time."""
        for s in self.slices(self.row_numel * self.dtype.itemsize, limit):
            yield s, self.take(s).rows()

    def widened(self) -> Self:
        """The same, with rows of half precision in float32: before anything is added up they might overflow."""
        parts = {n: v for n in ("g", "x", "r") if isinstance(v := getattr(self, n, None), Tensor)}
        if self.dtype.itemsize >= 4 or not parts:
            return self
        wide = {n: accumulable(v) for n, v in parts.items()}
        return replace(self, **wide, dtype=torch.float32)  # pyright: ignore[reportArgumentType]

    def add_to(self, rows: Tensor) -> None:
        """Add rows to those given, (b, *shape)."""
        for s, g in self.pieces():
            rows[s] += g

    def sq_norms(self) -> Tensor:
        """(b,): the squared norm of each row, accumulated in at least float32."""
        return gather([squared_norms(g) for _, g in self.widened().pieces()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(*shape): sum over b of weights[b] times row b."""
        parts = ((weights[s], accumulable(g)) for s, g in self.widened().pieces())
        return total(torch.tensordot(w.to(g.dtype), g, 1) for w, g in parts).to(self.dtype)

    def sum_squares(self) -> Tensor:
        """(*shape): sum over b of the squared modulus of row b, elementwise."""
        return total(square(accumulable(g)).sum(0) for _, g in self.widened().pieces())

    def dot(self, v: Tensor) -> Tensor:
        """(b,): the inner product of each row with `v` (*shape)."""
        direction = accumulable(v.reshape(-1)).conj()
        return gather([real(accumulable(flat(g)) @ direction) for _, g in self.widened().pieces()])

    def inner(self, other: Factor) -> Tensor:
        """(b,): the inner product of each row with the same example's row of `other`."""
        return gather([dots(g, other.widened().take(s).rows()) for s, g in self.widened().pieces()])

    def gram(self, other: Factor) -> Tensor:
        """(b, c): the inner products of all rows with all rows of `other`."""
        lines, other = [], other.widened()
        for _, g in self.widened().pieces(BLOCK_BYTES):
            g = accumulable(flat(g))
            lines.append(
                torch.cat([real(g @ accumulable(flat(h)).mH) for _, h in other.pieces(BLOCK_BYTES)], 1)
            )
        return gather(lines)


def slices(batch: int, bytes_of_example: int, limit: int | None = None) -> Iterator[slice]:
    """A batch in runs of examples that together take about `limit` bytes, or `PIECE_BYTES`."""
    if isinstance(batch, torch.SymInt):  # a graph for every batch size has no loop over it
        yield slice(0, batch)
        return
    size = max(1, (limit or PIECE_BYTES) // max(1, bytes_of_example))
    for start in range(0, batch, size) or range(1):  # an empty batch is one empty piece
        yield slice(start, min(start + size, batch))


def is_recorded(x: Tensor) -> bool:
    """Whether the run is being written down as a graph, in which no shape can depend on data."""
    return isinstance(x, FakeTensor)


def flat(g: Tensor) -> Tensor:
    """(b, p): rows with what is not the batch in one dimension, also where there is nothing else."""
    return g.unsqueeze(-1).flatten(1)


def channels_last(x: Tensor) -> Tensor:
    """(b, (t s), c) from (b, t, c, *s)."""
    return x.unsqueeze(-1).flatten(3).movedim(2, 3).flatten(1, 2)


def accumulable(x: Tensor) -> Tensor:
    """`x` in a dtype that sums of products may be accumulated in: half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def weighted(x: Tensor, weights: Tensor) -> Tensor:
    """`x` (b, ...) with example b multiplied by weights[b], rounded once: a clipping weight may vanish in float16."""
    wide = accumulable(x) if x.dtype != weights.dtype else x
    return (wide * weights.to(wide.dtype).reshape(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def weighted_pair(g: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a product, the smaller one weighted: the copy of a language model's logits is worth saving."""
    if prod(g.shape[1:]) <= prod(x.shape[1:]):
        return weighted(g, weights), x
    return g, weighted(x, weights)


def square(x: Tensor) -> Tensor:
    """|x|^2 elementwise, real."""
    return real(x * x.conj()) if x.is_complex() else x * x


# elements whose squares are added without a copy of them, in plain float32: few enough that rounding does not add up
RUN = 1024


def squared_norms(g: Tensor) -> Tensor:
    """(b,): the squared norm of each row of g (b, ...), accumulated in at least float32."""
    g = flat(g)
    whole = g.shape[1] // RUN
    if whole < 32 or is_recorded(g) or (torch.is_grad_enabled() and g.requires_grad):
        return square(accumulable(g)).sum(1)
    runs = g[:, : whole * RUN].unflatten(1, (whole, RUN))
    wide = accumulable(g[:0]).dtype
    return torch.linalg.vector_norm(runs, dim=2, dtype=wide).square().sum(1) + square(
        accumulable(g[:, whole * RUN :])
    ).sum(1)


def real(x: Tensor) -> Tensor:
    """The real part: the inner product of complex gradients as real ones."""
    return x.real if x.is_complex() else x


def dots(g: Tensor, h: Tensor) -> Tensor:
    """(b,): the inner products of g and h, each (b, ...)."""
    return flat(real(accumulable(g) * accumulable(h).conj())).sum(1)


def gather(parts: list[Tensor]) -> Tensor:
    """Parts along the batch, as one."""
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def total(parts: Iterator[Tensor]) -> Tensor:
    """The sum of parts, one at a time."""
    result = next(parts)
    for part in parts:
        result = result + part
    return result


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts of one shape, in the widest of their dtypes."""
    widest = functools.reduce(torch.promote_types, (p.dtype for p in parts))
    return torch.stack([p.to(widest) for p in parts]).sum(0)


def into(out: Tensor | None, rows: Tensor) -> Tensor:
    """`rows`, copied into `out` where that is given."""
    return rows if out is None else out.copy_(rows)
