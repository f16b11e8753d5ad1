"""A recorded graph made fit to run anywhere: under `torch.func.vmap`, `torch.compile`, `torch.export`, on any batch size.

- `detach` and `alias`, which mean nothing without autograd, go;
- checks of a factorisation, which raise, become `nan` in what it gives;
- `view` becomes `reshape` and `sym_size` becomes `Tensor.size`, which `torch.func.vmap` also takes for strided and wrapped
  tensors, and its sizes are numbers where they are known: a `-1` is ambiguous in an empty batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..base.nodes import by_name, is_differentiable, put_behind, use_instead, value
from .views import shorten_views

aten = torch.ops.aten


def make_portable(graph: fx.Graph, *, differentiable: bool) -> None:
    """Replace what stands in the way; without `differentiable`, let no gradient pass."""
    for node in list(graph.nodes):
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
    reshape_views(graph)
    shorten_views(graph)
    if not differentiable:
        _cut_gradients(graph)
    graph.lint()


_METHODS = {aten.sym_size.int: "size", aten.sym_numel.default: "numel"}

# a slice and its relatives -> the operand that they give where the slice is everything
_SLICES = {
    aten.slice.Tensor: "self",
    aten.slice_scatter.default: "src",
    aten.slice_backward.default: "grad_output",
}
_TO_THE_END = torch.iinfo(torch.int64).max


def reshape_views(graph: fx.Graph) -> None:
    """Turn each `view` into a `reshape`, which takes any strides."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target, node.args = aten.reshape.default, (node.args[0], _known_sizes(node))


def _known_sizes(node: fx.Node) -> list[Any]:
    """The sizes of a view, with a number for `-1` where there is one."""
    found = value(node).shape
    return [
        n if s == -1 and isinstance(s, int) and isinstance(n, int) else s
        for s, n in zip(node.args[1], found, strict=True)  # pyright: ignore[reportArgumentType]
    ]


def without_checks(graph: fx.Graph) -> None:
    """Turn `_linalg_check_errors(info)` into `nan` where it would raise: an operation that raises is not functional."""
    for check in [n for n in graph.nodes if n.target is aten._linalg_check_errors.default]:
        info = check.args[0]
        results = [n for n in info.args[0].users if n is not info and value(n).dtype.is_floating_point]
        for result in results:
            with graph.inserting_before(max(result, info).next):
                _poison(graph, result, info)
        graph.erase_node(check)


def _poison(graph: fx.Graph, result: fx.Node, info: fx.Node) -> None:
    """`result` (*b, ...), and nan for the matrices whose `info` (*b) tells of a failure."""
    extra = value(result).dim() - value(info).dim()
    failed = graph.call_function(aten.ne.Scalar, (info, 0))
    for _ in range(extra):
        failed = graph.call_function(aten.unsqueeze.default, (failed, -1))
    poisoned = graph.call_function(aten.masked_fill.Scalar, (result, failed, float("nan")))
    poisoned.meta.update(result.meta)
    use_instead(poisoned, result)


def _same_as(node: fx.Node) -> Any:
    """An operand that is all that the node gives; None where the node does something."""
    if node.target in (aten.detach.default, aten.alias.default):
        return node.args[0]
    if node.target is aten.copy.default:  # the functional `copy(destination, source)`
        source = node.args[1]
        before, after = value(source), value(node)  # pyright: ignore[reportArgumentType]
        alike = (
            before.dtype == after.dtype
            and before.device == after.device
            and list(before.shape) == list(after.shape)
        )
        return source if alike else None
    if node.target not in _SLICES:
        return None
    a = by_name(node.target, node.args, node.kwargs)
    if a["start"] in (0, None) and a["end"] in (None, _TO_THE_END) and a["step"] == 1:
        return a[_SLICES[node.target]]  # pyright: ignore[reportArgumentType]
    a["start"], a["end"] = _bounds(a)
    node.args, node.kwargs = tuple(a.values()), {}
    return None


def _bounds(a: dict[str, Any]) -> tuple[Any, Any]:
    """Where a slice begins and ends, without numbers below zero or beyond the size, which vmap does not take."""
    sizes = a["input_sizes"] if "input_sizes" in a else value(a["self"]).shape
    n, start, end = sizes[a["dim"]], a["start"], a["end"]
    if isinstance(n, int) and all(isinstance(k, int | None) for k in (start, end)):
        start, end, _ = slice(start, end).indices(n)
        return start, max(start, end)
    if end == _TO_THE_END:
        end = n if "input_sizes" in a else None
    return start, end


def _cut_gradients(graph: fx.Graph) -> None:
    """Let no gradient pass, so that without `create_graph` the result is a constant, as the function's is."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node in inputs:
        if is_differentiable(value(node)):
            put_behind(node, aten.detach.default, after=inputs[-1])
