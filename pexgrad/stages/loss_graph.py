"""The losses of a batch as a graph, in which what they depend on can be seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..base import trees
from ..base.fakes import TRACING, fake_batch, quiet, symbolic_mode
from .mixing import Mixing, first_mixing

# for which what the recording took for granted has to hold; of one example alone there is nothing to mix
_SIZES = (*range(2, 65), 1 << 10, 1 << 12)

Losses = Callable[[Any, Any, Any], Tensor]  # (the model's output, y, the batch size) -> (B,)


def mixing_in(
    losses: Losses, whole: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], y: Any
) -> Mixing | None:
    """What the losses look at of a whole batch; None where there is nothing.

    `whole` makes the model's output of its tensors (B, ...).

    Raises:
        Exception: of any kind, where their code has no graph for every batch size.
    """
    # of their own: what the code fixes must not fix the sizes that the model's trace speaks of
    mode, env = symbolic_mode()
    fakes = [fake_batch(mode, t.detach()) for t in (*tensors, *trees.tensors(y))]
    size = fakes[0].shape[0]
    (batch,) = size.node.expr.free_symbols  # pyright: ignore[reportAttributeAccessIssue]

    def run(*flat: Tensor) -> Tensor:
        left = iter(flat[len(tensors) :])
        return losses(
            whole(flat[: len(tensors)]), trees.map_tensors(lambda _: next(left), y), flat[0].shape[0]
        )

    with quiet(), TRACING:
        record = make_fx(run, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
        graph = record(*fakes).graph
    every_size = all(bool(g.expr.subs(batch, n)) for g in env.guards for n in _SIZES)
    if not every_size or batch in env.replacements:
        raise ValueError("the losses depend on the batch size")
    *nodes, output = graph.nodes
    given = [n for n in nodes if n.op == "placeholder"]
    return first_mixing(graph, given, output.all_input_nodes, batch)
