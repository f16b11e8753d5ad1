"""From a value that is computed from parameters back to the parameters, through operations that turn a factor into a factor.

Where every operation on the way does, the rows of a merged low-rank update, of a scale 1 + w or of a table of relative positions
are never built at the size of the value. Elsewhere autograd takes the value's rows or sums back (`pullback.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ..base.nodes import Writes, by_name, is_model_of, nodes_in, value
from ..factors import Factor
from ..rules.registry import Rule, find_pullback
from ..stages.flow import Flow
from ..stages.sites import Operand
from ..tracing.trace import Trace
from .pullback import Window, find_window

# paths to one value that are followed: code that uses parameters again and again has more
MOST = 16
LONGEST = 100  # operations on one path


@dataclass(frozen=True, eq=False)
class Step:
    """One operation, from its result to one of its operands."""

    pullback: Rule
    arguments: dict[str, Any]
    operand: Tensor  # its fake value

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """Whose values it takes."""
        return nodes_in([self.arguments[n] for n in self.pullback.residuals])

    def of(self, factor: Factor, values: Mapping[fx.Node, Any]) -> Factor | None:
        """From a factor of the result that of the operand, if it is one."""
        given = {**self.arguments, "shape": self.operand.shape, "dtype": self.operand.dtype}
        residuals = map_arg([self.arguments[n] for n in self.pullback.residuals], values.__getitem__)
        return self.pullback.function(factor, *residuals, **{n: given[n] for n in self.pullback.statics})


@dataclass(frozen=True, eq=False)
class Path:
    """From a value to one use of one parameter in it."""

    window: Window
    steps: tuple[Step, ...]

    def of(self, factor: Factor, values: Mapping[fx.Node, Any]) -> Factor | None:
        """From a factor of the value that of the parameter, if it is one."""
        for step in self.steps:
            found = step.of(factor, values)
            if found is None:
                return None
            factor = found
        return factor


class Paths:
    """The search for them in one trace."""

    def __init__(self, trace: Trace, flow: Flow, params: dict[str, Tensor]):
        self._trace, self._flow, self._params = trace, flow, params
        self._writes = Writes(trace.graph)

    def to(self, operand: fx.Node) -> tuple[Path, ...]:
        """All from a parameter-only value; none at all where a factor would not stay one along each."""
        return tuple(self._search(operand, LONGEST) or ())

    def _search(self, node: fx.Node, left: int) -> list[Path] | None:
        if not left or self._writes.ever(node):
            return None
        params = tuple(sorted(self._flow.states[node].params))
        window = find_window(self._trace, Operand("", node, params), self._params)
        if window is not None:
            return [Path(window, ())]
        if not isinstance(node.target, OpOverload):
            return None
        found = []
        arguments = by_name(node.target, node.args, node.kwargs)
        for n, state in self._flow.operands[node].items():
            if not state.params or is_model_of(n, node):
                continue
            steps, further = self._steps(node, n, arguments), self._search(n, left - 1)
            if not steps or further is None or len(found) + len(steps) * len(further) > MOST:
                return None
            found += [replace(path, steps=(step, *path.steps)) for step in steps for path in further]
        return found

    def _steps(self, node: fx.Node, operand: fx.Node, arguments: dict[str, Any]) -> list[Step] | None:
        """One for each place of an operand in an operation; None where one has no pullback, or takes what may change."""
        places = [k for k, v in arguments.items() if operand in nodes_in(v)]
        pullbacks = [find_pullback(node.target, k) for k in places]
        steps = [Step(p, arguments, value(operand)) for p in pullbacks if p is not None]
        numbers = [arguments.get(n) for s in steps for n in s.pullback.statics]
        if len(steps) < len(places) or value(operand).dtype != value(node).dtype or any(nodes_in(numbers)):
            return None
        taken = [n for s in steps for n in s.nodes]
        settled = all(isinstance(value(n), Tensor) and not self._writes.ever(n) for n in taken)
        return steps if settled else None
