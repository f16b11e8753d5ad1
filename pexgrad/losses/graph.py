"""The losses of a batch as a graph, in which what they depend on can be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..base import trees
from ..base.fakes import TRACING, Guards, fake_batch, quiet, symbolic_len, symbolic_mode
from ..base.symbols import symbol_of
from ..stages.alone import mixing_alone
from ..stages.layout import Layout
from ..stages.mixing_by_shape import Mixing, first_mixing
from ..stages.tracked import tracked
from .outputs import Outputs

# for which what the recording took for granted has to hold
_SIZES = (*range(2, 65), 1 << 10, 1 << 12)

OfBatch = Callable[[Any, Any, Any], Tensor]  # (the model's output, y, the batch size) -> (B,)


@dataclass(frozen=True, eq=False)
class LossGraph:
    """What the losses of a batch are computed by."""

    graph: fx.Graph
    given: list[fx.Node]  # the model's output and y
    batch: Any
    guards: Guards

    @property
    def _outputs(self) -> list[fx.Node]:
        return self.graph.output_node().all_input_nodes

    def serves(self, batch: int) -> bool:
        """Whether the code goes the same way for a batch of that size."""
        return self.guards.hold(batch)

    def mixing(self) -> Mixing | None:
        """What they look at of a whole batch; None where there is nothing."""
        found = first_mixing(self.graph, self.given, self._outputs, self.batch)
        if found is not None or self.is_by_example:
            return found
        return mixing_alone(self.graph, self.given, self.batch)

    @cached_property
    def is_by_example(self) -> bool:
        """Whether examples stay in their order, whatever the numbers are."""
        places = tracked(self.graph, self.given, self.batch)
        return all(places.get(n) == Layout() for n in self._outputs)


def graph_of(losses: OfBatch, outputs: Outputs, tensors: Sequence[Tensor], y: Any) -> LossGraph | None:
    """The graph of losses for every batch size, at outputs of the model; None where their code has none."""
    if outputs.plain():
        with contextlib.suppress(Exception):  # the loss may do what no graph can
            return _recorded(losses, outputs, tensors, y)
    return None


def _recorded(losses: OfBatch, outputs: Outputs, tensors: Sequence[Tensor], y: Any) -> LossGraph:
    # of their own: what the code fixes must not fix the sizes that the model's trace speaks of
    mode, env = symbolic_mode()
    fakes = [fake_batch(mode, t.detach()) for t in (*tensors, *trees.tensors(y))]
    size = fakes[0].shape[0]
    batch = symbol_of(size)

    def run(*flat: Tensor) -> Tensor:
        left = iter(flat[len(tensors) :])
        targets = trees.map_tensors(lambda _: next(left), y)
        return losses(outputs.whole(flat[: len(tensors)]), targets, flat[0].shape[0])

    with quiet(), TRACING, symbolic_len():
        record = make_fx(run, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
        graph = record(*fakes).graph
    given = [n for n in graph.nodes if n.op == "placeholder"]
    found = LossGraph(graph, given, batch, Guards(batch, tuple({g.expr for g in env.guards})))
    if batch in env.replacements or not all(map(found.serves, _SIZES)):
        raise ValueError("the losses depend on the batch size")
    return found
