"""A loss that gives one number, called once for the batch, with the reductions in it taken for each example.

Three things have to hold: it gives what the definition gives on a few examples, a graph of it shows that examples stay in their
order whatever the numbers are, and later calls go by the same steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import trees
from ..base.compare import largest_error
from ..base.fakes import is_recorded
from ..base.history import is_through_custom
from ..base.modes import validated
from ..base.numerics import is_inexact
from ..base.still import StandStill
from ..inputs.call import Call
from ..inputs.preserved import preserved
from ..inputs.snapshot import Snapshot
from ..inputs.walk import snapshot
from ..stages.few_examples import shrunk, varied
from .graph import LossGraph, graph_of
from .loss import Examples, LossFunction, copied
from .outputs import Outputs, refuse_written
from .reductions import NotPerExample, OverExamples, Sizes
from .steps import Step, common, is_one_of


@dataclass(eq=False)
class Reduced:
    """Losses by one call for the batch, as long as the loss is made of the same reductions."""

    loss: LossFunction
    outputs: Outputs
    code: Snapshot
    graph: LossGraph
    steps: list[list[Step]]  # by which it may go, each list a whole call
    sizes: Sizes
    coefficients: list[Any]  # the latest that were the same for example 0 alone

    def losses(self, output: Any, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor | None:
        """(B,); None where the loss has changed, fails, or goes by unknown steps, as another coefficient may make it."""
        if not self._is_same_code(batch):
            return None
        versions = [t._version for t in tensors]
        first = [] if is_recorded(tensors[0]) else [t[:1].detach().clone() for t in tensors]
        with contextlib.suppress(Exception):
            losses, mode = over_examples(self.loss, output, y, batch, self.sizes)
            if is_one_of(mode.steps, self.steps) and (not first or self._same_alone(mode, first, y)):
                return losses
        refuse_written(tensors, versions)
        return None

    def _is_same_code(self, batch: Any) -> bool:
        """Whether the loss is still made of the same, for a batch of that size; coefficients may change."""
        served = isinstance(batch, torch.SymInt) or self.graph.serves(batch)
        return served and snapshot(self.loss.loss).same_but_for_floats(self.code)

    def _same_alone(self, mode: OverExamples, first: list[Tensor], y: Any) -> bool:
        """Whether coefficients that have changed are not made of the size of the batch: example 0 alone has the same."""
        if mode.coefficients != self.coefficients:
            with torch.no_grad(), StandStill(), preserved(self.loss.loss):
                of_first = self.outputs.whole(first), trees.examples(y, 0, 1)
                _, alone = over_examples(self.loss, *of_first, 1, self.sizes)
            if alone.coefficients != mode.coefficients or not is_one_of(alone.steps, self.steps):
                return False
            self.coefficients = mode.coefficients
        return True


def over_examples(
    loss: LossFunction, output: Any, y: Any, batch: Any, sizes: Sizes, *, noting: bool = False
) -> tuple[Tensor, OverExamples]:
    """(b,): a loss that gives one number, its reductions taken for each example; and what it did.

    Sizes of the batch in its arithmetic are those of `sizes`, or are noted there.

    Raises:
        NotPerExample: where the loss does anything else.
    """
    y, given = copied(y), [t.grad_fn for t in trees.tensors(output)]
    mode = OverExamples(batch, trees.tensors((output, y)), sizes, noting)
    with mode:
        value = loss.loss(output, y)
    if not mode.are_numbers(value) or not value.is_floating_point():
        raise NotPerExample
    # the code of a custom function has had numbers of all examples in the place of one, and so would its backward
    if is_through_custom(value, given):
        raise NotPerExample
    return value, mode


def reduced(loss: LossFunction, outputs: Outputs, tensors: Sequence[Tensor], few: Call) -> Reduced | None:
    """Losses by reductions; None where the loss is not made of them, for every batch size, or these outputs do not tell.

    They are changed, so that no two numbers are alike: a model that has learned nothing yet may give all examples the same.
    """
    if outputs.plain():
        with contextlib.suppress(NotPerExample):
            for change in (varied, shrunk):
                if (found := _reduced(loss, outputs, change(tensors), few)) is not None:
                    return found
    return None


def _reduced(loss: LossFunction, outputs: Outputs, tensors: list[Tensor], few: Call) -> Reduced | None:
    """The same for outputs as they are; None where these do not tell.

    Raises:
        NotPerExample: where the loss is not made of reductions.
    """
    y, batch, sizes = few.y, few.batch, Sizes()

    def noting(output: Any, y: Any, batch: Any) -> Tensor:
        return over_examples(loss, output, y, batch, sizes, noting=True)[0]

    graph = graph_of(noting, outputs, tensors, y)
    if graph is None or not graph.is_by_example or graph.mixing() is not None:
        raise NotPerExample
    with torch.enable_grad():
        alone = _alone(loss, outputs.examples(tensors, y, batch), batch)
        found = [] if alone is None else _steps(loss, outputs, tensors, few, sizes, alone)
    if alone is None:
        return None
    if not found:
        raise NotPerExample
    return Reduced(loss, outputs, snapshot(loss.loss), graph, found, sizes, coefficients=[])


def _alone(loss: LossFunction, examples: Examples, batch: int) -> Tensor | None:
    """(b,) by the definition; None where the loss takes no such output, or tells no examples apart by it."""
    try:
        alone = loss.of_each(examples, batch).detach()
    except Exception:  # noqa: BLE001 - numbers that are no probabilities, say
        return None
    numbers = alone[alone.isfinite()]  # an example whose targets are all ignored has none
    if len(numbers) < 2 or bool((numbers - numbers[0]).abs().max() <= 1e-4 * numbers.abs().max()):
        return None
    return alone


def _steps(
    loss: LossFunction, outputs: Outputs, tensors: list[Tensor], few: Call, sizes: Sizes, alone: Tensor
) -> list[list[Step]]:
    """The steps by which reductions give each example its own number, with and without checks; none where they do not."""
    y, batch, examples = few.y, few.batch, outputs.examples(tensors, few.y, few.batch)
    leaves = [t.detach().requires_grad_(is_inexact(t)) for t in tensors]
    found = []
    for checks in (contextlib.nullcontext(), validated()):  # as now, and as in the calls to come
        with contextlib.suppress(Exception), checks:  # whatever it is, the definition does without
            output = outputs.whole([t.clone() for t in leaves])  # a loss may write into what it is given
            together, mode = over_examples(loss, output, y, batch, sizes)
            _, single = over_examples(loss, *examples(0), 1, sizes)
            steps = common(mode.steps, single.steps)
            same = steps is not None and mode.coefficients == single.coefficients
            if not same or largest_error({"": together.detach()}, {"": alone}) is not None:
                return []
            found.append(steps)
    return found
