"""What every factor offers. A factor implements `rows` and `narrow`; the rest follows from them.

Axes: b batch, t positions, then the operand's own. For a factor with rows G (b, *shape):

    sq_norms       |G_b|^2
    weighted_sum   sum_b w_b G_b
    dot            <G_b, v>
    inner          <G_b, H_b> with another factor's rows H
    gram           <G_b, H_c>
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

# what a default may materialise of rows at a time: small against any model, large enough to be efficient
PIECE_BYTES = 1 << 24


class Factor(ABC):
    """The per-example gradient of one use of one operand, not yet multiplied out."""

    shape: tuple[int, ...]  # the operand's shape
    dtype: torch.dtype  # the operand's dtype, which rows have

    @property
    @abstractmethod
    def batch(self) -> int:
        """The number of examples."""

    @abstractmethod
    def rows(self) -> Tensor:
        """(b, *shape)."""

    @abstractmethod
    def narrow(self, start: int, length: int) -> Factor:
        """The same for some of the examples."""

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, a bounded number of examples at a time."""
        size = max(1, PIECE_BYTES // max(1, self.row_numel * self.dtype.itemsize))
        for start in range(0, self.batch, size):
            length = min(size, self.batch - start)
            yield slice(start, start + length), self.narrow(start, length).rows()

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        numel = 1
        for n in self.shape:
            numel *= n
        return numel

    def sq_norms(self) -> Tensor:
        """(b,): the squared norm of each row, accumulated in at least float32."""
        return _gather([square(g).sum(1) for _, g in self._flat_pieces()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(*shape): sum over b of weights[b] times row b."""
        parts = [torch.tensordot(weights[s].to(g.dtype), g, 1) for s, g in self.pieces()]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def dot(self, v: Tensor) -> Tensor:
        """(b,): the inner product of each row with `v` (*shape)."""
        flat = v.reshape(-1)
        return _gather([g @ flat.to(g.dtype) for _, g in self._flat_pieces()])

    def inner(self, other: Factor) -> Tensor:
        """(b,): the inner product of each row with the same example's row of `other`."""
        return _gather(
            [real(g * other.narrow(s.start, s.stop - s.start).rows().flatten(1)).sum(1) for s, g in self._flat_pieces()]
        )

    def gram(self, other: Factor) -> Tensor:
        """(b, c): the inner products of all rows with all rows of `other`."""
        return torch.cat(
            [torch.cat([g @ h.mT for _, h in other._flat_pieces()], 1) for _, g in self._flat_pieces()], 0
        )

    def _flat_pieces(self) -> Iterator[tuple[slice, Tensor]]:
        for s, g in self.pieces():
            yield s, accumulable(g.flatten(1))


def accumulable(x: Tensor) -> Tensor:
    """`x` in a dtype that sums of squares may be accumulated in: half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def square(x: Tensor) -> Tensor:
    """|x|^2 elementwise, real."""
    return real(x * x.conj()) if x.is_complex() else x * x


def real(x: Tensor) -> Tensor:
    """The real part."""
    return x.real if x.is_complex() else x


def _gather(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) != 1 else parts[0]
