"""What is known of a loss of the user's, whose code and settings may be others at the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..inputs.snapshot import snapshot
from .loss_graph import LossGraph

# examples that are compared with the definition: at a size of batch for which no graph speaks, and where the code reads
# another number than it did
_MANY, _FEW = 256, 4


class Watch:
    """A loss that is called for all examples at once, and how far it is known that they stay apart in it.

    Its graph speaks for every size of batch that it serves, as long as the code is the same. A number that the code reads may
    lead it another way (`if step > 1000`), so that a few examples are looked at again.
    """

    def __init__(self, loss: Callable[..., Any], graph: LossGraph | None):
        self.graph = graph  # None where its code has none
        self._loss = loss
        self._first = self._now = self._compared = snapshot(loss)
        self._sizes = set[int]()

    def holds(self) -> bool:
        """Whether the code is the same as at first, whatever numbers it reads."""
        self._now = snapshot(self._loss)
        return self._now.same_but(self._first, int, float)

    def vouches(self, batch: int | torch.SymInt) -> bool:
        """Whether the graph speaks for a batch of that size, and for all that the code reads but floats."""
        return self._now.same_but(self._first, float) and self._serves(batch)

    def to_compare(self, batch: int) -> tuple[int, int]:
        """What a batch of that size can be relied on after: (size of a batch, how many of its examples to compare)."""
        if not self._serves(batch) and batch not in self._sizes:
            return batch, min(batch, _MANY)
        few = 0 if self._now.same(self._compared) else min(batch, _FEW)
        return few, few

    def compared(self, batch: int) -> None:
        """Remember that this was done."""
        self._compared = self._now
        self._sizes.add(batch)

    def _serves(self, batch: int | torch.SymInt) -> bool:
        return self.graph is not None and (isinstance(batch, torch.SymInt) or self.graph.serves(batch))
