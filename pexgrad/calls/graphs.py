"""The flat graphs of a transform's calls: recorded on demand, kept, and forgotten when what is written into them changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ..base.fakes import TRACING
from ..flat.lower import Answer, lower
from ..flat.lowered import Lowered
from ..inputs.arguments import Options
from ..inputs.call import Call
from ..inputs.held import Held, Place
from ..inputs.preserved import preserved
from ..inputs.snapshot import Snapshot
from ..inputs.walk import snapshot
from ..pipeline import Pipeline
from .repeats import Repeats


class Graphs:
    """Flat graphs by pipeline, and those of `Repeats`, kept as long as the user's functions in `written_in` do not change."""

    def __init__(self, written_in: Sequence[Callable[..., Any]]):
        self.repeats = Repeats()
        self._written_in = written_in
        self._known: WeakKeyDictionary[Pipeline, dict[int, list[Lowered]]] = WeakKeyDictionary()
        # what the functions read when these were recorded, and the tensors among it as they were
        self._reads: list[tuple[Snapshot, dict[Place, Held]]] | None = None

    def of(
        self, pipeline: Pipeline, call: Call, options: Options, answer: Answer, further: Sequence[Tensor]
    ) -> Lowered:
        """The graph that serves a call, recorded now if none does."""
        with TRACING:
            self.notice_reads()
            known = self._known.setdefault(pipeline, {}).setdefault(len(further), [])
            for lowered in known:
                if lowered.serves(call.batch):
                    return lowered
            with preserved(*self._written_in):
                known.append(lower(pipeline, call, options, answer, further))
            return known[-1]

    def notice_reads(self) -> None:
        """Forget the graphs where a function of the user's that is written into them holds or reads something else.

        A tensor is in a graph itself, whatever its numbers become, unless Python code took one out of it.
        """
        reads = [snapshot(function) for function in self._written_in]
        graphs = (graph for of in self._known.values() for known in of.values() for graph in known)
        numbers = any(graph.reads_numbers for graph in graphs)
        if self._reads is None or not all(
            new.same(old) and new.holds(tensors, numbers=numbers)
            for new, (old, tensors) in zip(reads, self._reads, strict=True)
        ):
            self._known.clear()
            self.repeats.clear()
            self._reads = [(found, found.contents()) for found in reads]
