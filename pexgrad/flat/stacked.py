"""A flat graph run for many members at once: some of its inputs are stacked, with the members on dimension 0.

A value that depends on a stacked input is `Stacked`, (m, *shape) for a member's (*shape); any other is computed once. Where there
is a rule for an operation on stacked values, it is one call for all members; where there is none, it is a loop over them.
`torch.func.vmap` over the same graph is quicker (`ensemble` has the numbers); but the library does without functorch, and this
way no operation needs a batching rule of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..base.nodes import by_name, draws, value
from . import stacking_layers as stacking_layers  # registers its rules
from .stacking import Stacked, rule_for


def is_random(module: fx.GraphModule) -> bool:
    """Whether the graph draws random numbers, which each member has to draw for itself."""
    return any(draws(n.target) for n in module.graph.nodes)


def run_stacked(module: fx.GraphModule, values: Sequence[Tensor | Stacked], members: int) -> list[Tensor]:
    """The graph's outputs, each with the members on dimension 0; plain `values` are the same for every member."""
    left = iter(values)
    found: dict[fx.Node, Any] = {}
    last = _last_uses(module.graph)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(left)
        elif node.op == "get_attr":
            found[node] = getattr(module, node.target)
        elif node.op == "output":
            return [_whole(v, members) for v in map_arg(node.args[0], found.__getitem__)]
        else:
            args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = _apply(node, args, kwargs, members)
        for done in last.get(node, ()):
            del found[done]
    raise AssertionError("a graph ends in its output")


def _whole(value: Tensor | Stacked, members: int) -> Tensor:
    return value.values if isinstance(value, Stacked) else value.expand(members, *value.shape).clone()


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """node -> the nodes that it is the last to use, whose values need no memory after it."""
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.users:
            last.setdefault(max(node.users), []).append(node)
    return last


def _apply(node: fx.Node, args: Any, kwargs: Any, members: int) -> Any:
    if not any(isinstance(v, Stacked) for v in pytree.tree_leaves((args, kwargs))):
        return _target(node)(*args, **kwargs)
    if node.target == "size":
        return args[0].shape[args[1]] if len(args) > 1 else args[0].shape
    if node.target == "numel":
        return args[0].shape.numel()
    if not isinstance(node.target, torch._ops.OpOverload):  # getitem of several results
        return node.target(*args, **kwargs)  # type: ignore[operator]
    rule = rule_for(node.target)
    result = NotImplemented if rule is None else rule(members, by_name(node.target, args, kwargs))
    if result is NotImplemented:
        return _loop(node.target, args, kwargs, members)
    return _in_dtype(result, node)


def _target(node: fx.Node) -> Any:
    if node.op == "call_method":
        return lambda own, *args, **kwargs: getattr(own, str(node.target))(*args, **kwargs)
    return node.target


def _loop(operation: Any, args: Any, kwargs: Any, members: int) -> Any:
    def of(i: int) -> Any:
        def one(v: Any) -> Any:
            return v.values[i] if isinstance(v, Stacked) else v

        own_args, own_kwargs = pytree.tree_map(one, (args, kwargs))
        return operation(*own_args, **own_kwargs)

    def stack(*parts: Any) -> Any:
        return Stacked(torch.stack(parts)) if isinstance(parts[0], Tensor) else parts[0]

    return pytree.tree_map(stack, *(of(i) for i in range(members)))


def _in_dtype(result: Any, node: fx.Node) -> Any:
    """A number of no dimensions does not decide the dtype of a result, but a stack of them may."""
    recorded = value(node)
    if isinstance(result, Stacked) and isinstance(recorded, Tensor) and result.values.dtype != recorded.dtype:
        return Stacked(result.values.to(recorded.dtype))
    return result
