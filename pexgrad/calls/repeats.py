"""Small models: a call that is made again and again runs as one flat graph.

Around a few microseconds of arithmetic, Python and autograd's records are most of what a call takes: 0.8 ms for three
layers of 64 at 32 examples on a CPU, and 0.35 through the flat graph; 3.3 and 2.0 ms for three convolutions and an example
of 32 x 32 pixels. So a small call that has been made `OFTEN` times is lowered, and answered by the graph from then on, if that
gave the same bits in less time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..base import trees
from ..base.fakes import TRACING
from ..base.modes import without_autocast
from ..flat.lowered import Lowered
from ..flat.plain import is_plain, is_plain_loss
from ..flat.running import without_autograd, writing_rows
from ..inputs.arguments import Options
from ..inputs.call import Call
from ..losses.loss import LossFunction
from ..pipeline import Pipeline

Buffers = Mapping[str, Tensor] | None

OFTEN = 100  # lowering takes as long as some hundred calls, and longer for long graphs
LONG = 100  # operations for which it takes that long again, up to three times
WORTHWHILE = 5e-4  # seconds for each operation: where they take longer, Python is a small part
SMALL = 1 << 26  # bytes of rows: beside larger ones Python is a small part


@dataclass(eq=False)
class _Repeated:
    """A call that has been made so often, and its graph once it has one."""

    made: int = 0
    seconds: float = math.inf  # that the fastest took
    graph: Lowered | None = None


class Repeats:
    """A transform's calls, counted and with their graphs, for each pipeline and batch size."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Pipeline, dict[tuple[int, bool], _Repeated]] = WeakKeyDictionary()

    def clear(self) -> None:
        """Forget the calls, and their graphs."""
        self._known.clear()

    def answer(
        self,
        pipeline: Pipeline,
        call: Call,
        eagerly: Callable[[Pipeline], Any],
        record: Callable[[], Lowered],
        out: Buffers = None,
    ) -> Any:
        """What `eagerly(pipeline)` returns, by the graph where there is one; either writes rows into `out` where that is given.

        `record()` is the graph of the call, for its batch size alone.
        """
        with TRACING:
            every = self._known.setdefault(pipeline, {})
            known = every.setdefault((call.batch, out is not None), _Repeated())
        if known.graph is not None:
            answer = _run(known.graph, call, out)
            if answer is not None:
                return answer
            known.graph = None  # such values may come again
        start = time.perf_counter()
        answer = eagerly(pipeline)
        known.seconds = min(known.seconds, time.perf_counter() - start)
        known.made += 1
        if _is_due(known, len(pipeline.program.module.graph.nodes)):
            known.graph = _graph_as_good(record, pipeline, call, answer, out, known.seconds)
        return answer


def may_repeat(call: Call, loss: LossFunction, options: Options) -> bool:
    """Whether a call is small and plain: tensors in and out, nothing around it, nothing in it that may do more than compute."""
    device = next(iter(call.params.values())).device.type
    plain = options.strategy == "crb" and not options.create_graph and options.chunk_size is None
    special = torch.is_autocast_enabled(device) or torch.is_anomaly_enabled()
    outside = forward_ad._current_level < 0 and not special
    small = 0 < call.bytes_of_rows() <= SMALL
    return plain and outside and small and is_plain_loss(loss) and _takes_tensors(call)


def _is_due(known: _Repeated, operations: int) -> bool:
    """Whether a call has been made so often that it is worth lowering; true once at most."""
    often = OFTEN * min(1 + operations // LONG, 3)
    return known.made == often + 1 and known.seconds < WORTHWHILE * operations


def _takes_tensors(call: Call) -> bool:
    """Whether a call takes parameters and tensors of no special kind, and nothing else that could change in place."""
    x, _ = trees.flatten(trees.as_call(call.x))
    values = [*call.params.values(), *x, *([] if call.y is None else [call.y])]
    return not call.module.buffers and all(type(v) in (Tensor, nn.Parameter) for v in values)


def _graph_as_good(
    record: Callable[[], Lowered], pipeline: Pipeline, call: Call, answer: Any, out: Buffers, seconds: float
) -> Lowered | None:
    """The graph of a call that was answered in so many seconds, if it gives the same bits faster."""
    try:
        if not is_plain(pipeline.program.module.graph):
            return None
        if not pipeline.losses.are_of_one_tensor(pipeline.program.run(call.values()).outputs, call.y):
            return None
        graph = record()
        if graph.reads_numbers:  # out of a tensor that may change in place
            return None
        graph = replace(graph, module=without_autograd(graph.module))
        if out is not None:
            graph = replace(graph, module=writing_rows(graph.module, len(out)))
            # not into the user's own, which are the answer
            out = {k: torch.empty_like(rows) for k, rows in out.items()}
        found = _run(graph, call, out)
        if found is None or not all(map(torch.equal, *map(pytree.tree_leaves, (found, answer)))):
            return None
        return graph if min(_seconds(graph, call, out) for _ in range(10)) < seconds else None
    except Exception:  # noqa: BLE001 - there is an answer, and whatever a graph fails of, the calls do without it
        return None


def _seconds(graph: Lowered, call: Call, out: Buffers) -> float:
    start = time.perf_counter()
    _run(graph, call, out)
    return time.perf_counter() - start


def _run(graph: Lowered, call: Call, out: Buffers) -> Any:
    """The graph's answer; None where it is not to be trusted."""
    values = call.flat()
    with torch.no_grad(), without_autocast(values[0].device.type):
        return graph.run([*values, *(out or {}).values()])
