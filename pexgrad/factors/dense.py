"""Dense factors: rows that are there already, and the fallback that replays an operation for each example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..base.numerics import flat, into, is_half, multiple, squared_norms
from ._base import Factor


@dataclass(frozen=True, eq=False)
class Rows(Factor):
    """Rows as they are."""

    values: Tensor  # (b, *shape)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.values.shape[1:])

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.values.dtype

    tensors = ("values",)

    def widened(self) -> Rows:
        return self  # a piece at a time, where it is used

    def rows(self, out: Tensor | None = None) -> Tensor:
        return into(out, self.values)

    def scaled(self, m: Tensor) -> Rows:
        return replace(self, values=multiple(self.values, m).to(self.values.dtype))

    def sq_norms(self) -> Tensor:
        # all at once, where nothing has to be copied to another precision
        return super().sq_norms() if is_half(self.dtype) else squared_norms(self.values)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if is_half(self.dtype):
            return super().weighted_sum(weights)
        return (weights.to(self.dtype) @ flat(self.values)).view(self.shape)


@dataclass(frozen=True, eq=False)
class WideRows(Rows):
    """Rows of half precision in float32, as they are for norms: not rounded, and none that overflows."""

    narrow: torch.dtype

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.narrow

    def widened(self) -> Rows:
        return Rows(self.values)

    def rows(self, out: Tensor | None = None) -> Tensor:
        return into(out, self.values.to(self.narrow))

    def sq_norms(self) -> Tensor:
        return self.widened().sq_norms()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.widened().weighted_sum(weights).to(self.narrow)


@dataclass(frozen=True, eq=False)
class Replay(Factor):
    """The fallback: exact for any operation, one vector-Jacobian product of it for each example."""

    vjp_of_example: Callable[[int], Tensor]  # b -> (*shape)
    # (total,) -> (*shape); None where the operation's own backward may not be linear in what arrives at it
    vjp_of_weights: Callable[[Tensor], Tensor] | None
    examples: range  # these, of a batch of `total`
    total: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    tensors = ()
    is_replayed = True

    @property
    def batch(self) -> int:
        return len(self.examples)

    def take(self, s: slice) -> Replay:
        return replace(self, examples=self.examples[s])

    def rows(self, out: Tensor | None = None) -> Tensor:
        return into(out, torch.stack([self.vjp_of_example(b) for b in self.examples]))

    def algorithm(self) -> str:
        return "replayed for each example"

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.vjp_of_weights is None:
            return super().weighted_sum(weights)
        padded = weights.new_zeros(self.total)
        padded[self.examples.start : self.examples.stop] = weights
        return self.vjp_of_weights(padded)
