"""Chains of views in a recorded graph, made short.

Rules add dimensions of size 1 and move dimensions as their formulas need them; recorded, that is half of a small model's
operations. A chain of views that leaves the elements in their order becomes one view, or none where it ends in the shape that it
began with. Two permutations in a row become one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..base.nodes import value
from ..base.symbols import expression

aten = torch.ops.aten

# a reshape may copy; the others never do
_ORDERLY = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
_PERMUTATIONS = (aten.permute.default, aten.transpose.int, aten.t.default)
_VIEWS = (*_ORDERLY, *_PERMUTATIONS, aten.select.int)


def shorten_views(graph: fx.Graph) -> None:
    """Replace each chain of views by as short a one as gives the same; those before it may stay for other users."""
    sizes: dict[Any, fx.Node] = {}  # the nodes that give sizes which are no numbers
    for node in list(graph.nodes):
        if isinstance(size := value(node), torch.SymInt):
            sizes.setdefault(expression(size), node)
        shorter = _shorter(graph, node, sizes)
        if shorter is not None:
            node.replace_all_uses_with(shorter)
            _erase_unused(node)
    for node in reversed(list(graph.nodes)):
        if node.target == "size" and not node.users:
            graph.erase_node(node)


def _shorter(graph: fx.Graph, node: fx.Node, sizes: dict[Any, fx.Node]) -> fx.Node | None:
    """What takes the place of a view; None where nothing does. Chains before it are short already."""
    root = _operand(node)
    if root is None:
        return None
    if (first := _permutation(root)) and (second := _permutation(node)):
        return _permuted(graph, node, _operand(root), [first[d] for d in second])
    if not _keeps_order(node):
        return None
    # a copy that others use too is not made twice
    while _keeps_order(root) and (root.target is not aten.reshape.default or len(root.users) == 1):
        root = _operand(root)
        assert root is not None
    return _reshaped(graph, node, root, sizes)


def _permuted(graph: fx.Graph, node: fx.Node, root: fx.Node | None, dims: list[int]) -> fx.Node | None:
    return root if dims == sorted(dims) else _instead(graph, node, aten.permute.default, (root, dims))


def _reshaped(graph: fx.Graph, node: fx.Node, root: fx.Node, sizes: dict[Any, fx.Node]) -> fx.Node | None:
    old, new = _dims(root), _dims(node)
    if old == new:
        return root
    if root is _operand(node):
        return None
    added = [d for d in range(len(new)) if new[d] == 1 and new[:d] + new[d + 1 :] == old]
    if added:
        return _instead(graph, node, aten.unsqueeze.default, (root, added[0]))
    with graph.inserting_before(node):
        for d, n in enumerate(old):
            if not isinstance(n, int) and n in new and n not in sizes:
                sizes[n] = graph.call_method("size", (root, d))
    known = [n if isinstance(n, int) else sizes.get(n) for n in new]
    return None if None in known else _instead(graph, node, aten.reshape.default, (root, known))


def _instead(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with graph.inserting_before(node):
        made = graph.call_function(target, args)
    made.meta.update(node.meta)
    return made


def _operand(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of; None where it is no view of one whose shape is known."""
    operand = node.args[0] if node.args else None
    views = node.target in _VIEWS
    known = isinstance(operand, fx.Node) and "val" in operand.meta and "val" in node.meta
    return operand if views and known else None  # pyright: ignore[reportReturnType]


def _keeps_order(node: fx.Node) -> bool:
    """Whether a node is a view of its operand's elements, all of them and in their order."""
    operand = _operand(node)
    if operand is None or node.target in _ORDERLY:
        return operand is not None
    sizes, dims = _dims(operand), _permutation(node)
    if dims is None:  # a selection
        return sizes[node.args[1]] == 1  # pyright: ignore[reportArgumentType, reportCallIssue]
    long = [d for d in dims if sizes[d] != 1]
    return long == sorted(long)


def _permutation(node: fx.Node) -> list[int] | None:
    """The operand's dimension that each dimension of the result is."""
    operand = _operand(node)
    if operand is None or node.target not in _PERMUTATIONS:
        return None
    dims, given = list(range(value(operand).dim())), node.args[1:]
    if node.target is aten.permute.default:
        return [dims[d] for d in given[0]]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    i, j = given or (0, -1)  # `t` is of at most two dimensions
    if dims:
        dims[i], dims[j] = dims[j], dims[i]  # pyright: ignore[reportArgumentType, reportCallIssue]
    return dims


def _dims(node: fx.Node) -> list[Any]:
    """The sizes, to be compared without a condition on the batch size: numbers, and expressions of it."""
    return [expression(n) for n in value(node).shape]


def _erase_unused(node: fx.Node | None) -> None:
    while node is not None and not node.users:
        before = _operand(node)
        node.graph.erase_node(node)
        node = before
