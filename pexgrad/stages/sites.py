"""Stage 3: the sites, where a parameter-only value with a gradient meets a batched value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..base.nodes import by_name, is_differentiable, value, where
from ..errors import ANY_MODEL, MixedExamplesError, TraceError
from ..tracing.opaque import HOOKED
from ..tracing.trace import Trace
from .flow import Flow
from .rewrite import parameter_operands

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A parameter-only operand of a site: the value whose per-example gradient a rule gives."""

    name: str  # `weight`, `bias`, ...: its name in the operation's schema
    node: fx.Node
    params: tuple[str, ...]  # the trainable parameters that it is computed from


@dataclass(frozen=True, eq=False)
class Site:
    """One use of parameters by one operation."""

    node: fx.Node
    operands: tuple[Operand, ...]
    outputs: tuple[fx.Node, ...]  # activations: the operation's differentiable outputs
    arguments: dict[str, Any]  # the operation's arguments by schema name

    @property
    def is_copies(self) -> bool:
        """Whether the activation is a parameter-only value for each example: no part of it is an example's data."""
        return self.node.target is aten.expand.default


def find_sites(trace: Trace, flow: Flow) -> list[Site]:
    """The sites of a rewritten trace, in the order in which they run."""
    sites = []
    for node in trace.graph.nodes:
        _refuse_inexact(node, flow)
        operands = parameter_operands(node, flow)
        if operands:
            arguments = _arguments(node)
            named = tuple(_operand(n, arguments, flow.operands[node][n].params) for n in operands)
            sites.append(Site(node, named, _outputs(node), arguments))
    return sites


def _operand(node: fx.Node, arguments: dict[str, Any], params: frozenset[str]) -> Operand:
    names = [k for k, v in arguments.items() if v is node]
    names += [
        f"{k}.{i}"
        for k, v in arguments.items()
        if isinstance(v, list | tuple)
        for i, n in enumerate(v)
        if n is node
    ]
    # passed twice: no single name, so no rule of its own
    return Operand(names[0] if len(names) == 1 else "*", node, tuple(sorted(params)))


def _arguments(node: fx.Node) -> dict[str, Any]:
    if not isinstance(node.target, OpOverload):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    return by_name(node.target, node.args, node.kwargs)


def _outputs(node: fx.Node) -> tuple[fx.Node, ...]:
    if not isinstance(value(node), tuple | list):
        return (node,)
    return tuple(n for n in node.users if is_differentiable(value(n)))


def _refuse_inexact(node: fx.Node, flow: Flow) -> None:
    if node.op == "output":
        return
    if node.meta.get(HOOKED) and flow.states[node].params and not flow.batched(node):
        raise TraceError(
            f"a tensor hook on a parameter-only value cannot be run per example ({where(node)}); {ANY_MODEL}"
        )
    if flow.batched(node) and _is_training_batch_norm(node):
        raise MixedExamplesError(
            f"batch normalisation in training mode ({where(node)}) mixes the examples of a batch, so a per-example gradient "
            "is not defined; put the model in .eval(), or use GroupNorm or InstanceNorm instead (in a model that takes "
            "derivatives in its own forward, GroupNorm)"
        )
    if not flow.grad_enabled[node]:
        return
    for n, read in flow.operands[node].items():
        if flow.states[n].params and read.from_input and not flow.states[n].from_input:
            raise TraceError(
                f"{where(n)} is computed from parameters and then overwritten with values that depend on the inputs; "
                f"write them into a tensor of its own, or {ANY_MODEL}"
            )


def _is_training_batch_norm(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or "batch_norm" not in node.target._schema.name:
        return False
    arguments = _arguments(node)
    return bool(arguments.get("training", arguments.get("train", False)))
