"""Steps over time, of which two are traced and the others are copies.

An operation takes milliseconds to trace: 0.1 s for the dozen of one step of an LSTM, and so 15 s for 150 steps. From the second
step on they are alike but for what they read, and to copy a node takes microseconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

aten = torch.ops.aten

State = tuple[Tensor, ...]
# (a step's input, state) -> state, of which the first tensor is the step's output
Step = Callable[[Tensor, State], State]


def over_time(step: Step, xs: Tensor, state: State, *, reverse: bool) -> tuple[Tensor, State]:
    """The outputs (t, ...) of a step that goes over xs (t, ...), forwards or backwards, and the last state."""
    mode, steps = get_proxy_mode(), xs.shape[0]
    if mode is None or not isinstance(steps, int) or steps <= 2:
        return _one_by_one(step, xs, state, reverse=reverse)
    graph = _Graph(mode.tracer)
    parts = graph.unbound(xs)
    if reverse:
        parts.reverse()
    first = step(graph.tensor(parts[0], xs), state)
    end = graph.last()
    second = step(graph.tensor(parts[1], xs), first)
    copied = graph.after(end)
    before, now = [graph.node(s) for s in first], [graph.node(s) for s in second]
    outputs = [before[0], now[0]]
    for part in parts[2:]:
        new = dict(zip((parts[1], *before), (part, *now), strict=True))
        for node in copied:
            new[node] = graph.copy(node, new)
        now = [new[n] for n in map(graph.node, second)]
        outputs.append(now[0])
    stacked = graph.stacked(outputs[::-1] if reverse else outputs, second[0])
    return stacked, tuple(graph.known(s.clone, n) for s, n in zip(second, now, strict=True))


def _one_by_one(step: Step, xs: Tensor, state: State, *, reverse: bool) -> tuple[Tensor, State]:
    outputs = []
    for part in reversed(xs.unbind(0)) if reverse else xs.unbind(0):
        state = step(part, state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


class _Graph:
    """The graph that is being traced, and what tensors stand for in it."""

    def __init__(self, tracer: Any):
        self._tracer = tracer

    def node(self, t: Tensor) -> fx.Node:
        """The node that a traced tensor is the value of."""
        return get_proxy_slot(t, self._tracer).proxy.node  # pyright: ignore[reportAttributeAccessIssue]

    def last(self) -> fx.Node:
        """The node that was traced last."""
        return next(iter(reversed(self._tracer.graph.nodes)))

    def after(self, end: fx.Node) -> list[fx.Node]:
        """What has been traced since."""
        found = []
        for node in reversed(self._tracer.graph.nodes):
            if node is end:
                break
            found.append(node)
        return found[::-1]

    def copy(self, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
        """A copy of a node that reads other nodes; they share a fake value, since no step writes into what it computes."""
        return self._tracer.graph.node_copy(node, lambda n: new.get(n, n))

    def known(self, make: Callable[[], Tensor], node: fx.Node) -> Tensor:
        """A tensor, made without being traced, as the value of a node."""
        with disable_proxy_modes_tracing():
            made = make()
        track_tensor_tree(made, fx.Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        return made

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self._tracer.create_proxy("call_function", target, args, {}).node

    def unbound(self, xs: Tensor) -> list[fx.Node]:
        """The nodes of `xs.unbind(0)`."""
        whole = self._call(aten.unbind.int, fx.Proxy(self.node(xs), self._tracer))
        with disable_proxy_modes_tracing():
            part = xs.detach().select(0, 0)
        whole.meta["val"] = [part] * xs.shape[0]
        parts = [self._call(operator.getitem, fx.Proxy(whole, self._tracer), i) for i in range(xs.shape[0])]
        for node in parts:
            node.meta["val"] = part
        return parts

    def tensor(self, part: fx.Node, xs: Tensor) -> Tensor:
        """One of them as a tensor."""
        return self.known(lambda: xs.select(0, part.args[1]), part)  # pyright: ignore[reportArgumentType]

    def stacked(self, nodes: list[fx.Node], like: Tensor) -> Tensor:
        """`torch.stack` of nodes with values alike."""
        node = self._call(aten.stack.default, [fx.Proxy(n, self._tracer) for n in nodes])
        shape = (len(nodes), *like.shape)
        return self.known(lambda: like.expand(shape).clone(memory_format=torch.contiguous_format), node)
