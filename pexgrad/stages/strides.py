"""Memory as a trace took it to be.

A graph is recorded on batches whose examples lie one after the other, and on what torch says its operations give. A batch may
lie otherwise (`x[::2]`, a part of a larger tensor), and so may what another kernel gives:

- a `view` becomes a `reshape`, which copies where it has to;
- `as_strided`, by which `torch.stft` cuts its frames, reads memory by strides that are numbers in the graph: what it reads is
  laid out as it was in the trace, and a place in memory is counted from where its operand begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..base.nodes import Writes, put_behind, storage, value
from ..errors import TraceError

aten = torch.ops.aten


def settle_strides(graph: fx.Graph) -> None:
    """Make the graph right for tensors of any strides."""
    nodes, writes = list(graph.nodes), Writes(graph)
    for node in nodes:
        # a view of what is written to later has to stay one
        if node.target is aten.view.default and not writes.behind(node, node):
            node.target = aten.reshape.default
    by_strides = [n for n in nodes if _reads_by_strides(n)]
    for node in by_strides:
        _count_from_operand(node)
    read = {storage(n) for n in by_strides}
    for node in nodes:
        # the first node of this memory is the one that makes it
        if storage(node) in read and node.op != "get_attr":
            read.discard(storage(node))
            put_behind(node, as_traced, [s if isinstance(s, int) else None for s in value(node).stride()])


def _reads_by_strides(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.name == "aten::as_strided"


def _count_from_operand(node: fx.Node) -> None:
    operand, size, stride, *place = node.args
    begins = value(operand).storage_offset()  # pyright: ignore[reportArgumentType]
    if place and isinstance(place[0], int) and isinstance(begins, int):
        node.target, node.args = strided_from, (operand, size, stride, place[0] - begins)


def strided_from(x: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    """The view of these sizes and strides that begins so many elements after `x` does."""
    return x.as_strided(size, stride, x.storage_offset() + start)


def as_traced(x: Tensor, strides: Sequence[int | None]) -> Tensor:
    """`x`, or a copy with these strides where it has others; None stands for one that depends on the batch size."""
    differ = [
        n != 1 and s is not None and s != t for n, s, t in zip(x.shape, strides, x.stride(), strict=True)
    ]
    if not any(differ):
        return x
    if None in strides:
        raise TraceError(
            f"as_strided reads a value of shape {tuple(x.shape)} that lies otherwise in memory, with strides {x.stride()}, "
            "than it did in the trace; make it .contiguous() before"
        )
    return x.new_empty_strided(x.shape, strides).copy_(x)  # pyright: ignore[reportArgumentType]


def copy_what_is_read_by_strides(graph: fx.Graph) -> None:
    """The same for a flat graph, which runs where strides cannot be looked at: it reads copies of what it is given."""
    read = {storage(n) for n in graph.nodes if _reads_by_strides(n)} - {None}
    given = [n for n in graph.nodes if n.op == "placeholder"]
    for node in [n for n in given if storage(n) in read]:
        if not value(node).is_contiguous() or value(node).storage_offset():
            raise TraceError(
                f"as_strided reads a tensor of shape {tuple(value(node).shape)} that is not contiguous, which a flat graph "
                "cannot repeat: let the model read x.contiguous(), or call the function itself"
            )
        put_behind(node, aten.clone.default, after=given[-1], memory_format=torch.contiguous_format)
