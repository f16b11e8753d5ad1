"""What every value in a traced graph depends on.

A value is *batched* when it depends on the inputs or has the batch size in its shape; every other value is
*parameter-only* (parameters, buffers, constants and what is computed from them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..base.nodes import is_differentiable, is_model_of, is_of_batch, mutated_operands, source, storage, value
from ..errors import ANY_MODEL, TraceError
from ..tracing.trace import Trace

aten = torch.ops.aten

# writes norm-limited rows back into the table: each example's rows get what it alone would give them
_BENIGN_WRITES = {aten.embedding_renorm_.default}


@dataclass(frozen=True)
class State:
    """What a value depends on: the inputs' data, and which trainable parameters with a gradient."""

    from_input: bool = False
    params: frozenset[str] = frozenset()

    def __or__(self, other: State) -> State:
        return State(self.from_input or other.from_input, self.params | other.params)


@dataclass
class Flow:
    """Dependencies of every node of a trace, at the moment the node runs."""

    states: dict[fx.Node, State] = field(default_factory=dict)
    operands: dict[fx.Node, dict[fx.Node, State]] = field(default_factory=dict)  # as read by each node
    grad_enabled: dict[fx.Node, bool] = field(default_factory=dict)
    batch: Any = None

    def batched(self, node: fx.Node) -> bool:
        """Whether the node's value belongs to examples."""
        return self.states[node].from_input or is_of_batch(value(node), self.batch)


def analyse(trace: Trace, trainable: set[str]) -> Flow:
    """Follow data, gradients and in-place writes through the graph, in order."""
    flow = Flow(batch=trace.batch)
    start = {trace.params[k]: State(params=frozenset([k])) for k in trainable}
    start |= {node: State(from_input=True) for node in trace.inputs}
    written: dict[int, State] = {}
    switched_off: fx.Node | None = None  # the node that has switched gradients off, while they are off

    for node in trace.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            switched_off = None if node.args[0] else node
        flow.grad_enabled[node] = switched_off is None
        reads = {n: flow.states[n] | written.get(storage(n), State()) for n in node.all_input_nodes}  # pyright: ignore[reportArgumentType, reportCallIssue]
        flow.operands[node] = reads
        state = start.get(node, State())
        for operand, read in reads.items():
            state = state if is_model_of(operand, node) else state | read
        if switched_off or node.target is aten.detach.default or not is_differentiable(value(node)):
            state = State(state.from_input)
        flow.states[node] = state
        for target in mutated_operands(node):
            key = storage(target)
            if key is not None and node.target not in _BENIGN_WRITES:
                written[key] = written.get(key, State()) | state
    if switched_off:
        raise TraceError(
            f"the model switches gradients off ({source(switched_off)}) and leaves them off; use `with torch.no_grad():`, "
            f"or {ANY_MODEL}"
        )
    return flow
