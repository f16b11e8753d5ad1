"""A loss that takes batches and gives each example its own numbers, (B, ...): it is called once for the batch.

Whether it keeps examples apart is found out for each branch that its code takes: by a graph of the loss, or, where it has none,
by calling it for a few examples alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import trees
from ..base.compare import TIMES, largest_error, moved
from ..base.fakes import is_recorded
from ..base.numerics import is_inexact
from ..base.still import StandStill
from ..errors import LossError, MixedExamplesError
from ..inputs.call import Call
from ..inputs.preserved import preserved
from ..inputs.walk import snapshot
from ..stages.layout import UntoldError
from ..stages.mixing_by_shape import Mixing
from .branches import Branch, Branches, Calls, form
from .graph import graph_of
from .loss import Examples, LossFunction
from .outputs import Outputs, refuse_written

# examples that are compared with the definition where a branch is not known: of a loss without a graph, in a batch at least
# twice as large as any before, and else
_MANY, _FEW = 256, 4


@dataclass(frozen=True, eq=False)
class Batched:
    """Losses by one call for the batch, as long as its code takes a branch that keeps examples apart."""

    loss: LossFunction
    outputs: Outputs
    branches: Branches

    def losses(self, output: Any, tensors: Sequence[Tensor], y: Any, batch: int) -> Tensor | None:
        """(B,); None where examples have to be taken by themselves."""
        branches = self.branches
        given, versions, calls = [t.grad_fn for t in tensors], [t._version for t in tensors], Calls()
        try:
            losses = self.loss.of_batch(
                output, y, batch, calls if branches.noting else contextlib.nullcontext()
            )
        except LossError as e:
            raise UntoldError(f"the loss gives something else than when it was traced: {e}") from e
        if is_recorded(losses):
            return losses
        if branches.graph is None:
            branches.notice(snapshot(self.loss.loss).values())
        taken = (form(losses, given), *calls.functions)
        known = branches.get(taken)
        branch = known or self._new_branch(tensors, y)
        by_numbers = calls.read_numbers and branch.graph is None  # other numbers in every batch
        is_new = known is None or by_numbers or not branch.covers(batch)
        if is_new or not branch.together:
            refuse_written(tensors, versions)
        if is_new:
            many = branch.graph is None and batch >= 2 * branches.largest
            self._compare(tensors, y, batch, batch if by_numbers else _MANY if many else _FEW)
            branches.keep(taken, branch, batch)
        return losses if branch.together else None

    def _new_branch(self, tensors: Sequence[Tensor], y: Any) -> Branch:
        if self.branches.graph is None:
            return Branch(None)
        with preserved(self.loss.loss):
            graph = graph_of(self.loss.of_batch, self.outputs, tensors, y)
        return Branch(graph, together=graph is None or graph.mixing() is None)

    def _compare(self, tensors: Sequence[Tensor], y: Any, batch: int, first: int) -> None:
        """Raise where the loss gives one of the first examples another number in this batch than alone."""
        with torch.no_grad(), StandStill(), preserved(self.loss.loss):
            together = self.loss.of_batch(self.outputs.copy(tensors), y, batch)
            _refuse_mixing(self.loss, together, self.outputs.examples(tensors, y, batch), min(batch, first))

    def mixing(self) -> Mixing | None:
        """Where the loss looks at all examples, as far as its code has a graph."""
        return None if self.branches.graph is None else self.branches.graph.mixing()


def batched(loss: LossFunction, outputs: Outputs, tensors: Sequence[Tensor], few: Call) -> Batched | None:
    """Losses by batches, with its examples compared for the size of these few; None where the loss takes no batches."""
    y, batch = few.y, few.batch
    examples = outputs.examples(tensors, y, batch)
    leaves = [t.clone().requires_grad_(is_inexact(t)) for t in tensors]
    given = [t.clone() for t in leaves]  # which may be written into
    nodes, calls = [t.grad_fn for t in given], Calls()
    with torch.enable_grad():
        losses = loss.of_batch_or_none(outputs.whole(given), y, batch, examples, calls)
    if losses is None:
        return None
    _refuse_mixing(loss, losses, examples, batch)
    graph = graph_of(loss.of_batch, outputs, tensors, y)
    read = snapshot(loss.loss)
    branches = Branches(graph, noting=graph is None or not read.is_code())
    branches.notice(read.values())
    branches.keep((form(losses, nodes), *(calls.functions if branches.noting else ())), Branch(graph), batch)
    return Batched(loss, outputs, branches)


def _refuse_mixing(loss: LossFunction, together: Tensor, examples: Examples, first: int) -> None:
    """Raise where the losses (B,) of a batch are not those of the first examples by themselves."""
    alone = loss.of_each(examples, first)
    for b, (got, want) in enumerate(zip(together[:first].detach(), alone.detach(), strict=True)):
        wrong = largest_error({"": got}, {"": want}) is not None
        if wrong and not _rounds_by(got - want, loss, *examples(b)):
            raise MixedExamplesError(
                f"{loss.name} gives example {b} of a batch {float(got):.4g}, and the same example alone "
                f"{float(want):.4g}: it depends on the other examples, or on how many there are. Return the losses of each "
                "example before anything is averaged or divided over the batch"
            )


def _rounds_by(difference: Tensor, loss: LossFunction, output: Any, y: Any) -> bool:
    """Whether other rounding of the output changes an example's loss by as much; near zero that may be all of it."""
    losses = [
        loss.of_one(trees.map_tensors(functools.partial(_rounded, steps=n), output), y) for n in (0, 1, -2, 4)
    ]
    by_rounding = torch.stack([other - losses[0] for other in losses]).abs().max()
    return bool(difference.abs() <= TIMES * by_rounding)


def _rounded(t: Tensor, steps: int) -> Tensor:
    """`t` with its numbers changed by so many roundings."""
    return moved(t, steps * torch.finfo(t.dtype).eps) if is_inexact(t) else t.clone()
