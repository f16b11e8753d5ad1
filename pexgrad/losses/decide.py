"""How the losses of a model's examples are computed: decided once for each trace, from the output for a few examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..inputs.call import Call
from ..stages.mixing_by_shape import Mixing
from .batched import Batched, batched
from .loss import LossFunction
from .outputs import Outputs
from .reduced import Reduced, reduced


@dataclass(frozen=True, eq=False)
class Losses:
    """`(tensors, y, batch) -> (B,)`: the losses of a traced model's examples."""

    loss: LossFunction
    outputs: Outputs
    by_batch: Batched | Reduced | None = None  # how it can be called for a batch

    def __call__(self, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor:
        output = self.outputs.whole(tensors)
        losses = self._of_torch(output, y)
        if losses is None and self.by_batch is not None:
            losses = self.by_batch.losses(output, tensors, y, batch)
        if losses is None:
            losses = self.loss.of_each(self.outputs.examples(tensors, y, batch), batch)
        return losses

    def _of_torch(self, output: Any, y: Any) -> Tensor | None:
        """(B,) losses by the reduction of one of torch's own; None where the loss itself has to be called."""
        vectorised = self.loss.vectorised
        return vectorised(output, y) if vectorised is not None and self.outputs.plain() else None

    def takes_batches(self) -> bool:
        """Whether the user's function is given batches, of which it gives each example a number."""
        return isinstance(self.by_batch, Batched)

    def are_of_one_tensor(self, tensors: Sequence[Tensor], y: Any) -> bool:
        """Whether they are computed from one tensor, for the whole batch at once."""
        output = self.outputs.whole(tensors)
        together = self.by_batch is not None and type(output) is Tensor
        return together or self._of_torch(output, y) is not None

    def mixing(self) -> Mixing | None:
        """Where a loss that takes batches looks at all examples, as far as its code has a graph."""
        return self.by_batch.mixing() if isinstance(self.by_batch, Batched) else None


def decided(loss: LossFunction, outputs: Outputs, tensors: Sequence[Tensor], few: Call) -> Losses:
    """How the losses of a model's output are to be computed, given the output for a few examples."""
    by_example = Losses(loss, outputs)
    tensors = [t.detach() for t in tensors]
    if (
        any(outputs.copied)
        or few.batch < 2
        or by_example._of_torch(outputs.whole(tensors), few.y) is not None
    ):
        return by_example
    by_batch = batched(loss, outputs, tensors, few) or reduced(loss, outputs, tensors, few)
    return Losses(loss, outputs, by_batch)
