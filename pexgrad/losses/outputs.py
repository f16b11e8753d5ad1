"""The model's output as a loss is given it, made of the tensors that a graph returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..base import trees
from ..errors import LossError
from ..stages.layout import Layout
from ..tracing.trace import Trace
from .loss import Examples


@dataclass(frozen=True, eq=False)
class Outputs:
    """How the graph's outputs become the model's output, whole or for one example."""

    trace: Trace
    layouts: list[Layout | None]
    copied: list[bool]  # the batch dimension is ours: the model's own output has none

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the batch."""
        return self.trace.output(tensors)

    def _parts(self, tensors: Sequence[Tensor], batch: int, b: int) -> list[Tensor]:
        parts = [
            t if at is None else at.example(t, batch, b) for t, at in zip(tensors, self.layouts, strict=True)
        ]
        return [p[0] if c else p for p, c in zip(parts, self.copied, strict=True)]

    def copy(self, tensors: Sequence[Tensor]) -> Any:
        """The output for the batch in memory of its own: a loss may write into what it is given."""
        return self.whole([t.detach().clone() for t in tensors])

    def examples(self, tensors: Sequence[Tensor], y: Any, batch: int) -> Examples:
        """Each example by itself, in memory of its own: what is written there is its own."""

        def example(b: int) -> tuple[Any, Any]:
            parts = self._parts(tensors, batch, b)
            return self.whole([t.clone() for t in parts]), trees.examples(y, b, b + 1)

        return example

    def plain(self) -> bool:
        """Whether every output has the batch on dimension 0, as torch's own losses expect."""
        return all(at == Layout() for at in self.layouts) and not any(self.copied)


def refuse_written(tensors: Sequence[Tensor], versions: list[int]) -> None:
    """Raise where a loss that is to be called again has written into tensors that had these versions."""
    if versions != [t._version for t in tensors]:
        raise LossError(
            "the loss writes into the model's output, and its code does something else than when it was traced, so that it has "
            "to be called again for single examples; let it write into a copy, output.clone()"
        )
