"""From the tensors of a graph's output to the losses of a batch; in which way is decided on a few examples, once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..base import trees
from ..base.fakes import is_recorded
from ..base.still import StandStill
from ..errors import LossError
from ..inputs.call import Call
from ..inputs.loss import ExampleLosses, Slices
from ..inputs.reductions import Sizes, Step, is_one_of
from ..tracing.trace import Trace
from .layout import Layout
from .loss_graph import LossGraph, recorded
from .mixing import Mixing
from .sample import shrunk, varied
from .watch import Watch


@dataclass(frozen=True, eq=False)
class Outputs:
    """How the graph's outputs become the model's output, whole or for one example."""

    trace: Trace
    layouts: list[Layout | None]
    copied: list[bool]  # the batch dimension is ours: the model's own output has none

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the batch."""
        return self.trace.output(tensors)

    def example(self, tensors: Sequence[Tensor], batch: int, b: int) -> Any:
        """The model's output for example b as a batch of one."""
        parts = [
            t if at is None else at.example(t, batch, b) for t, at in zip(tensors, self.layouts, strict=True)
        ]
        return self.trace.output([p[0] if c else p for p, c in zip(parts, self.copied, strict=True)])

    def copy(self, tensors: Sequence[Tensor]) -> Any:
        """The output for the batch in memory of its own: a loss may write into what it is given."""
        return self.whole([t.detach().clone() for t in tensors])

    def slices(self, tensors: Sequence[Tensor], batch: int) -> Slices:
        """b -> the output for example b as a batch of one."""
        return functools.partial(self.example, tensors, batch)

    def plain(self) -> bool:
        """Whether every output has the batch on dimension 0, as torch's own losses expect."""
        return all(at == Layout() for at in self.layouts) and not any(self.copied)


@dataclass(frozen=True, eq=False)
class Reductions:
    """What a loss of one number is made of, in which each example gets its own."""

    ways: list[list[Step]]  # the steps that it may go by
    sizes: Sizes


@dataclass(frozen=True, eq=False)
class Losses:
    """`(tensors, y, batch) -> (B,)`: the losses of a traced model's examples."""

    loss: ExampleLosses
    outputs: Outputs
    watch: Watch | None  # where the loss is called for all examples at once, and not for each
    reductions: Reductions | None  # where it gives one number then, and not each example its own

    @property
    def batched(self) -> bool:
        """Whether the loss takes batches, and gives each example its own number."""
        return self.watch is not None and self.reductions is None

    def hold(self) -> bool:
        """Whether the loss has still the code that it had when it was looked at."""
        return self.watch is None or self.watch.holds()

    def __call__(self, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor:
        output = self.outputs.whole(tensors)
        losses = self._of_torch(output, y)
        if losses is None and self.watch is not None:
            if self.reductions is None:
                losses = self._of_batch(self.watch, output, tensors, y, batch)
            elif self.watch.vouches(batch):
                losses = self._of_reductions(self.reductions, output, tensors, y, batch)
        if losses is None:
            losses = self.loss.of_slices(self.outputs.slices(tensors, batch), y, batch)
        return losses

    def _of_batch(self, watch: Watch, output: Any, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor:
        if not is_recorded(tensors[0]):
            self._compare(watch, tensors, y, batch)
        return self.loss.of_batch(output, y, batch)

    def _of_reductions(
        self, reductions: Reductions, output: Any, tensors: Sequence[Tensor], y: Any, batch: int
    ) -> Tensor | None:
        """None where the loss has gone another way: a coefficient may lead its code there, where a batch may fail."""
        versions = [t._version for t in tensors]
        with contextlib.suppress(Exception):
            losses, mode = self.loss.of_reductions(output, y, batch, reductions.sizes)
            if is_one_of(mode.steps, reductions.ways):
                return losses
        if versions != [t._version for t in tensors]:
            raise LossError(
                "the loss writes into the model's output, and its code has changed since it was traced, so that it has to be "
                "called again for each example; let it write into a copy, output.clone()"
            )
        return None

    def _of_torch(self, output: Any, y: Any) -> Tensor | None:
        """(B,) losses by the reduction of one of torch's own; None where the loss itself has to be called."""
        form = self.loss.vectorised
        return form(output, y) if form is not None and self.outputs.plain() else None

    def are_of_one_tensor(self, tensors: Sequence[Tensor], y: Any) -> bool:
        """Whether they are computed from one tensor, for the whole batch at once."""
        output = self.outputs.whole(tensors)
        return self._of_torch(output, y) is not None or (self.batched and type(output) is Tensor)

    def mixing(self) -> Mixing | None:
        """What a loss that takes batches looks at of a whole one, as far as its code has a graph."""
        graph = self.watch.graph if self.watch is not None and self.batched else None
        return None if graph is None else graph.mixing()

    def _compare(self, watch: Watch, tensors: Sequence[Tensor], y: Any, batch: int) -> None:
        """Raise where a loss that takes batches gives an example another number in this one than alone, if that is open.

        Raises:
            MixedExamplesError: which names the example and the numbers.
        """
        size, first = watch.to_compare(batch)
        if not first:
            return
        if size < batch and self.outputs.plain():
            tensors, y, batch = [t[:size] for t in tensors], trees.examples(y, 0, size), size
        own = [t.detach().clone() for t in tensors]  # the loss may write into what it is given
        with torch.no_grad(), StandStill():
            together = self.loss.of_batch(self.outputs.copy(tensors), y, batch)
            self.loss.refuse_mixing(together, self.outputs.slices(own, batch), y, first)
        watch.compared(batch)


def decided(loss: ExampleLosses, outputs: Outputs, tensors: Sequence[Tensor], sample: Call) -> Losses:
    """The way that the losses of a model's output are computed, from the output for a sample."""
    by_example = Losses(loss, outputs, watch=None, reductions=None)
    tensors, y = [t.detach() for t in tensors], sample.y
    if any(outputs.copied) or sample.batch < 2 or by_example._of_torch(outputs.whole(tensors), y) is not None:
        return by_example
    if loss.takes_batches(outputs.copy(tensors), outputs.slices(tensors, sample.batch), y, sample.batch):
        return Losses(loss, outputs, Watch(loss.loss, _graph(loss.of_batch, outputs, tensors, y)), None)
    if outputs.plain():
        for change in (varied, shrunk):
            found = _reduced(loss, outputs, change(tensors), sample)
            if found is not None:
                return found or by_example
    return by_example


def _graph(losses: Any, outputs: Outputs, tensors: Sequence[Tensor], y: Any) -> LossGraph | None:
    if outputs.plain():
        with contextlib.suppress(Exception):  # the loss may do what no graph can
            return recorded(losses, outputs.whole, tensors, y)
    return None


def _reduced(
    loss: ExampleLosses, outputs: Outputs, tensors: list[Tensor], sample: Call
) -> Losses | Literal[False] | None:
    """By reductions that give each example its own number, for every batch size; False where there are none.

    None where these outputs do not tell. They are changed ones, in which no two numbers are alike: those of a model that has
    learned nothing yet tell nothing.
    """
    y, batch, sizes = sample.y, sample.batch, Sizes()

    def noting(output: Any, y: Any, batch: Any) -> Tensor:
        return loss.of_reductions(output, y, batch, sizes, noting=True)[0]

    graph = _graph(noting, outputs, tensors, y)
    if graph is None or not graph.is_by_example() or graph.mixing() is not None:
        return False
    # each anew: a loss may write into what it is given
    whole = functools.partial(outputs.copy, tensors)
    ways = loss.reduces(
        whole, lambda b: outputs.example([t.clone() for t in tensors], batch, b), y, batch, sizes
    )
    if not ways:
        return None if ways is None else False
    return Losses(loss, outputs, Watch(loss.loss, graph), Reductions(ways, sizes))
