"""Examples that mix, found by the numbers: the operation that mixed them first, and a whole batch in which they do."""

from __future__ import annotations

import torch
from torch import fx

from ..base.nodes import batch_dims, value, where
from ..errors import MixedExamplesError
from .layout import Layout, candidates
from .trial import Others, Trial


def mixed(before: Trial, after: Trial, b: int) -> MixedExamplesError:
    """The error for an output of example b that is another `after` the other examples have changed."""
    node = _first_mixing(before, after, b)
    at = f" first in {where(node)}" if node is not None else ""
    return MixedExamplesError(
        f"the output of one example depends on another example: they mix{at}. Per-example gradients are defined only "
        "where each example's output depends on that example alone; compute over every dimension but the batch"
    )


def _first_mixing(before: Trial, after: Trial, b: int) -> fx.Node | None:
    values, others, batch = before.values(), after.values(), before.trace.batch
    for node in before.program.module.graph.nodes:
        if node not in values or node.op == "placeholder":
            continue
        x, y = values[node], others[node]
        options = list(candidates(value(node), batch))
        if options and all(before.moves(at, x, y, b) for at in options):
            return node
        if not batch_dims(value(node), batch) and x.shape == y.shape and not torch.equal(x, y):
            return node
    return None


def refuse_mixing_in(trial: Trial, outputs: list[Layout | None]) -> None:
    """Raise where an example of the whole batch, of which the probe sees a few, has another output there than alone.

    That is decided by whether it moves with the others: what is alone goes through other kernels, and may be rounded
    to the other side of a step.
    """
    batch = trial.batch
    size = next((n for n in (1, 2, 3) if trial.trace.serves(n)), batch)
    if size >= batch:
        return
    whole = [t.detach() for t in trial.run().outputs]
    for b in sorted({0, batch // 2, batch - 1}):
        alone = trial.of(trial.call.take([b] * size)).run().outputs
        pairs = [(at, x, y) for at, x, y in zip(outputs, whole, alone, strict=True) if at is not None]
        if all(trial.agree(at.view(x, batch)[b], at.view(y, size)[0]) for at, x, y in pairs):
            continue
        try:
            changed, after = Others(trial).run(b)
        except (IndexError, RuntimeError):  # values that do not fit one another
            continue
        if any(
            at is not None and trial.moves(at, x, y, b)
            for at, x, y in zip(outputs, whole, after, strict=True)
        ):
            raise mixed(trial, changed, b)
