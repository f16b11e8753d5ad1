"""A lowered graph as a module that is called like the function that it comes from: `module(params, x, y)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from ..errors import InputError, TraceError
from ..inputs.call import Call
from .lowered import Lowered


def with_arguments(
    lowered: Lowered,
    call: Call,
    given: tuple[Any, Any, Any],
    whole: Callable[[Any], Any],
) -> fx.GraphModule:
    """The graph as a module called like the function: `module(params, x, y)`; `given` are examples of those three.

    `whole` nests what is by name in the result as the parameters are nested. Parameters that were not given, and buffers, become
    buffers of the module: the same tensors as the model's own.
    """
    leaves, spec = pytree.tree_flatten((given, {}))
    names = [
        _name(path, own)
        for own, tree in zip(("params", "x", "y"), given, strict=True)
        for path, _ in pytree.tree_flatten_with_path(tree)[0]
    ]
    args = [n for n in lowered.module.graph.nodes if n.op == "placeholder"]
    n_examples = len(call.inputs()) + len(call.targets())
    n_given = sum(isinstance(v, Tensor) for v in leaves) - n_examples
    own = {k: call.params[k].detach() for k in list(call.params)[n_given:]} | call.module.buffers
    if n_given < 0 or len(args) != n_given + len(own) + n_examples:
        raise TraceError(
            "this call cannot be lowered: its inputs are of classes that torch's pytree does not take apart; pass them as "
            "tensors, tuples, lists and dicts, or register the class with torch.export.register_dataclass"
        )
    root, graph = _root(lowered.module, own), fx.Graph()
    bound = args[:n_given] + args[n_given + len(own) :]
    new = _placeholders(graph, leaves, names, bound)
    for node, k in zip(args[n_given:], own, strict=False):
        new[node] = graph.get_attr(_safe(k))
        new[node].meta.update(node.meta)
    served = lowered.sizes(call.batch)
    if served != (0, None):
        graph.call_function(check_batch, (new[args[n_given + len(own)]], *served))
    tree = whole(pytree.tree_unflatten(list(graph.graph_copy(lowered.module.graph, new)), lowered.spec))  # pyright: ignore[reportArgumentType]
    result, result_spec = pytree.tree_flatten(tree)
    _name_results(tree)
    graph.output(result)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["params", "x", "y"], spec, result_spec)))
    graph.lint()
    module = fx.GraphModule(root, graph, "Lowered")
    module.meta["batch"] = _in_words(*served)
    return module


@has_side_effect
def check_batch(x: Tensor | fx.Proxy, smallest: int, largest: int | None) -> None:
    """Raise where x (B, ...) has a batch size that the graph does not serve."""
    if isinstance(x, fx.Proxy):  # the graph is being read from its own code, as when it is unpickled
        x.tracer.create_proxy("call_function", check_batch, (x, smallest, largest), {})
        return
    if x.shape[0] < smallest or (largest is not None and x.shape[0] > largest):
        raise InputError(
            f"this graph is for batches of {_in_words(smallest, largest)}, and x has {x.shape[0]} examples; lower the function "
            "for that batch size, or call it itself"
        )


def _in_words(smallest: int, largest: int | None) -> int | str:
    if largest is None:
        return f"{smallest} or more" if smallest else "any"
    return smallest if smallest == largest else f"{smallest} to {largest}"


def _placeholders(
    graph: fx.Graph, leaves: list[Any], names: list[str], bound: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """One for each leaf, those that are no tensors included; old node -> new node."""
    left, new = iter(bound), {}
    for leaf, name in zip(leaves, names, strict=True):
        node = graph.placeholder(name)
        if isinstance(leaf, Tensor):
            old = next(left)
            node.meta.update(old.meta)
            new[old] = node
    return new


def _root(module: fx.GraphModule, own: dict[str, Tensor]) -> torch.nn.Module:
    """What the graph's attributes are read from: the constants of the flat one, and the model's own tensors."""
    root = torch.nn.Module()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(node.target, getattr(module, node.target))
    for k, t in own.items():
        root.register_buffer(_safe(k), t)
    return root


def _name_results(tree: Any) -> None:
    """Name the nodes of the result by their place in it."""
    for path, node in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(node, fx.Node) and node.op == "call_function":
            node._rename(_name(path, "result"))


def _name(path: Sequence[Any], *before: str) -> str:
    """A place in a tree as a name."""
    return _safe("_".join([*before, *map(_word, path)]))


def _word(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
