"""From the tensors of a graph's output to the losses (B,) of a batch. How they are computed is decided once, on a few examples:

- one of torch's own losses without its reduction, which is then done for each example (`torch_losses.py`);
- a loss (B, ...) is called for the batch, and again for a few examples alone wherever its code goes another way (`loss_ways.py`);
- a loss of one number is called for the batch, its reductions taken for each example, where that is right (`reductions.py`);
- any other is called for each example: the definition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..base import trees
from ..base.fakes import is_recorded
from ..base.numerics import is_inexact
from ..base.still import StandStill
from ..errors import LossError
from ..inputs.call import Call
from ..inputs.loss import ExampleLosses, Examples
from ..inputs.preserved import preserved
from ..inputs.reductions import OverExamples, Sizes
from ..inputs.snapshot import Snapshot, snapshot
from ..inputs.steps import Step, is_one_of
from ..tracing.trace import Trace
from .few_examples import shrunk, varied
from .layout import Layout, UntoldError
from .loss_graph import LossGraph, recorded
from .loss_ways import Calls, Way, Ways, form
from .mixing_by_shape import Mixing

# examples that are compared with the definition where the code of a loss goes a way that is not known: of a loss without a
# graph, in a batch at least twice as large as any before, and else
_MANY, _FEW = 256, 4


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
        """b -> the output and y of example b as a batch of one, in memory of its own: what is written there is its own."""

        def example(b: int) -> tuple[Any, Any]:
            parts = self._parts(tensors, batch, b)
            return self.whole([t.clone() for t in parts]), trees.examples(y, b, b + 1)

        return example

    def plain(self) -> bool:
        """Whether every output has the batch on dimension 0, as torch's own losses expect."""
        return all(at == Layout() for at in self.layouts) and not any(self.copied)


@dataclass(eq=False)
class Reductions:
    """What a loss of one number is made of, where the reductions in it can be taken for each example."""

    code: Snapshot
    graph: LossGraph
    ways: list[list[Step]]  # the steps that it may go by
    sizes: Sizes
    coefficients: list[Any]  # the latest that were the same for example 0 alone

    def are_of(self, loss: ExampleLosses, batch: Any) -> bool:
        """Whether the loss is still made of the same, for a batch of that size; coefficients may change."""
        known = isinstance(batch, torch.SymInt) or self.graph.serves(batch)
        return known and snapshot(loss.loss).same_but_for_floats(self.code)


@dataclass(frozen=True, eq=False)
class Losses:
    """`(tensors, y, batch) -> (B,)`: the losses of a traced model's examples."""

    loss: ExampleLosses
    outputs: Outputs
    ways: Ways | None = None  # where the loss takes batches, and gives each example its own number
    reductions: Reductions | None = None  # where it gives one number, and is made of these

    @property
    def batched(self) -> bool:
        """Whether the loss takes batches, and gives each example its own number."""
        return self.ways is not None

    def __call__(self, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor:
        output = self.outputs.whole(tensors)
        losses = self._of_torch(output, y)
        for way in (self._of_batch, self._of_reductions):
            losses = way(output, tensors, y, batch) if losses is None else losses
        if losses is None:
            losses = self.loss.of_each(self.outputs.examples(tensors, y, batch), batch)
        return losses

    def _of_batch(self, output: Any, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor | None:
        """None where the loss is of another kind, or examples have to be taken by themselves."""
        if (ways := self.ways) is None:
            return None
        given, versions, calls = [t.grad_fn for t in tensors], [t._version for t in tensors], Calls()
        try:
            losses = self.loss.of_batch(output, y, batch, calls if ways.noting else contextlib.nullcontext())
        except LossError as e:
            raise UntoldError(f"the loss gives something else than when it was traced: {e}") from e
        if is_recorded(losses):
            return losses
        if ways.graph is None:
            ways.notice(snapshot(self.loss.loss).values())
        gone = (form(losses, given), *calls.functions)
        known = ways.get(gone)
        way = known or self._new_way(ways, tensors, y)
        by_numbers = calls.read_numbers and way.graph is None  # other numbers in every batch
        is_new = known is None or by_numbers or not way.covers(batch)
        if is_new or not way.together:
            _refuse_written(tensors, versions)
        if is_new:
            many = way.graph is None and batch >= 2 * ways.largest
            self._compare(tensors, y, batch, batch if by_numbers else _MANY if many else _FEW)
            ways.keep(gone, way, batch)
        return losses if way.together else None

    def _new_way(self, ways: Ways, tensors: Sequence[Tensor], y: Any) -> Way:
        with preserved(self.loss.loss):
            graph = _graph(self.loss.of_batch, self.outputs, tensors, y) if ways.graph is not None else None
        return Way(graph, together=graph is None or graph.mixing() is None)

    def _compare(self, tensors: Sequence[Tensor], y: Any, batch: int, first: int) -> None:
        """Raise where the loss gives one of the first examples another number in this batch than alone."""
        with torch.no_grad(), StandStill(), preserved(self.loss.loss):
            together = self.loss.of_batch(self.outputs.copy(tensors), y, batch)
            self.loss.refuse_mixing(together, self.outputs.examples(tensors, y, batch), min(batch, first))

    def _of_reductions(self, output: Any, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor | None:
        """None where the loss is of another kind, fails, or goes a way that is not known, as a coefficient may let it."""
        if (known := self.reductions) is None or not known.are_of(self.loss, batch):
            return None
        versions = [t._version for t in tensors]
        first = [] if is_recorded(tensors[0]) else [t[:1].detach().clone() for t in tensors]
        with contextlib.suppress(Exception):
            losses, mode = self.loss.of_reductions(output, y, batch, known.sizes)
            if is_one_of(mode.steps, known.ways) and (not first or self._same_alone(known, mode, first, y)):
                return losses
        _refuse_written(tensors, versions)
        return None

    def _same_alone(self, known: Reductions, mode: OverExamples, first: list[Tensor], y: Any) -> bool:
        """Whether coefficients that have changed are not made of the size of the batch: example 0 alone has the same."""
        if mode.coefficients != known.coefficients:
            with torch.no_grad(), StandStill(), preserved(self.loss.loss):
                of_first = self.outputs.whole(first), trees.examples(y, 0, 1)
                _, alone = self.loss.of_reductions(*of_first, 1, known.sizes)
            if alone.coefficients != mode.coefficients or not is_one_of(alone.steps, known.ways):
                return False
            known.coefficients = mode.coefficients
        return True

    def _of_torch(self, output: Any, y: Any) -> Tensor | None:
        """(B,) losses by the reduction of one of torch's own; None where the loss itself has to be called."""
        vectorised = self.loss.vectorised
        return vectorised(output, y) if vectorised is not None and self.outputs.plain() else None

    def are_of_one_tensor(self, tensors: Sequence[Tensor], y: Any) -> bool:
        """Whether they are computed from one tensor, for the whole batch at once."""
        output = self.outputs.whole(tensors)
        together = self.batched or self.reductions is not None
        return self._of_torch(output, y) is not None or (together and type(output) is Tensor)

    def mixing(self) -> Mixing | None:
        """Where a loss that takes batches looks at all examples, as far as its code has a graph."""
        return None if self.ways is None or self.ways.graph is None else self.ways.graph.mixing()


def _refuse_written(tensors: Sequence[Tensor], versions: list[int]) -> None:
    if versions != [t._version for t in tensors]:
        raise LossError(
            "the loss writes into the model's output, and its code does something else than when it was traced, so that it has "
            "to be called again for single examples; let it write into a copy, output.clone()"
        )


def decided(loss: ExampleLosses, outputs: Outputs, tensors: Sequence[Tensor], few: Call) -> Losses:
    """How the losses of a model's output are to be computed, by what the output for a few examples tells."""
    by_example = Losses(loss, outputs)
    tensors, y = [t.detach() for t in tensors], few.y
    if any(outputs.copied) or few.batch < 2 or by_example._of_torch(outputs.whole(tensors), y) is not None:
        return by_example
    ways = _first_way(loss, outputs, tensors, few)
    if ways is not None:
        return Losses(loss, outputs, ways=ways)
    if outputs.plain():
        for change in (varied, shrunk):
            found = _reduced(loss, outputs, change(tensors), few)
            if found is not None:
                return found or by_example
    return by_example


def _first_way(loss: ExampleLosses, outputs: Outputs, tensors: Sequence[Tensor], few: Call) -> Ways | None:
    """The way of a loss that takes batches, with its examples compared for the size of these few; None for any other."""
    y, batch = few.y, few.batch
    examples = outputs.examples(tensors, y, batch)
    leaves = [t.clone().requires_grad_(is_inexact(t)) for t in tensors]
    given = [t.clone() for t in leaves]  # which may be written into
    nodes, calls = [t.grad_fn for t in given], Calls()
    with torch.enable_grad():
        losses = loss.together(outputs.whole(given), y, batch, examples, calls)
    if losses is None:
        return None
    loss.refuse_mixing(losses, examples, batch)
    graph = _graph(loss.of_batch, outputs, tensors, y)
    read = snapshot(loss.loss)
    ways = Ways(graph, noting=graph is None or not read.is_code())
    ways.notice(read.values())
    ways.keep((form(losses, nodes), *(calls.functions if ways.noting else ())), Way(graph), batch)
    return ways


def _graph(losses: Any, outputs: Outputs, tensors: Sequence[Tensor], y: Any) -> LossGraph | None:
    if outputs.plain():
        with contextlib.suppress(Exception):  # the loss may do what no graph can
            return recorded(losses, outputs.whole, tensors, y)
    return None


def _reduced(
    loss: ExampleLosses, outputs: Outputs, tensors: list[Tensor], few: Call
) -> Losses | Literal[False] | None:
    """Losses by reductions that give each example its own number, for every batch size; False where there are none.

    None where these outputs do not tell. They are changed ones, in which no two numbers are alike: a model that has learned
    nothing yet may give all examples the same.
    """
    y, batch, sizes = few.y, few.batch, Sizes()

    def noting(output: Any, y: Any, batch: Any) -> Tensor:
        return loss.of_reductions(output, y, batch, sizes, noting=True)[0]

    graph = _graph(noting, outputs, tensors, y)
    if graph is None or not graph.is_by_example() or graph.mixing() is not None:
        return False
    leaves = [t.detach().requires_grad_(is_inexact(t)) for t in tensors]

    def whole() -> Any:  # each anew: a loss may write into what it is given
        return outputs.whole([t.clone() for t in leaves])

    with torch.enable_grad():
        ways = loss.reduces(whole, y, batch, outputs.examples(tensors, y, batch), sizes)
    if not ways:
        return None if ways is None else False
    known = Reductions(snapshot(loss.loss), graph, ways, sizes, coefficients=[])
    return Losses(loss, outputs, reductions=known)
