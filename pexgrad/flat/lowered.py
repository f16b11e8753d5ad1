"""A flat graph as it has been recorded, and the batch sizes that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..base.fakes import Guards

_LARGEST = 1 << 12  # a graph that serves this batch size is taken to serve all larger ones


@dataclass(frozen=True, eq=False)
class Lowered:
    """The flat graph: parameters, buffers, input tensors and target tensors in, the result's tensors out."""

    module: fx.GraphModule
    spec: pytree.TreeSpec  # of the result
    batch: int | Guards  # the one size that it is for, or what holds for those that it is for
    reads_numbers: bool  # whether Python code took numbers out of constants
    doubts: bool  # whether its last result says that the others are not to be trusted for these values

    def serves(self, batch: int) -> bool:
        """Whether the graph is right for this batch size."""
        if isinstance(self.batch, int):
            return batch == self.batch
        return self.batch.hold(batch)

    def sizes(self, batch: int) -> tuple[int, int | None]:
        """The smallest and the largest batch size, around `batch`, that the graph serves; None: there is no largest."""
        if isinstance(self.batch, int):
            return self.batch, self.batch
        low, high = batch, batch
        while low > 0 and self.serves(low - 1):
            low -= 1
        while high < _LARGEST and self.serves(high + 1):
            high += 1
        return low, None if high == _LARGEST else high

    def run(self, values: Sequence[Tensor]) -> Any:
        """The result for these values; None where the graph is not to be trusted for them."""
        results = self.module.forward(*values)
        if self.doubts and results.pop():
            return None
        return pytree.tree_unflatten(results, self.spec)
