"""Operations that look at all examples at once, found by the shapes in a graph.

The probe runs a few examples, and sees what mixes them there. A gain for the whole batch that is 1 until a number is large, or an
expert that takes so many tokens of the batch, mixes only some batches. Such an operation is known by what it does to
the batch dimension, whatever the numbers are:

- it takes values with the batch and gives one without, or one with two batch dimensions: `x.max()`, `z @ z.T`;
- it sorts, scans or turns along the batch: `cumsum(0)`, `roll(1, 0)`;
- the size of the batch, or an example's place in it, enters as a number: `h / len(h)`, `torch.arange(len(h))`.

Where that reaches an output, an example's output is not its own. Picking by an index along the batch is left to the probe, as is
the place of an example where it serves as an index: `h[torch.arange(len(h)), last]` picks from each example.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..base.nodes import (
    batch_dims,
    bind,
    by_name,
    is_differentiable,
    is_model_of,
    is_size,
    nodes_in,
    operation,
    storage,
    value,
    written_memory,
)


class Mixing(NamedTuple):
    """An operation that looks at all examples, or a number that depends on how many there are."""

    node: fx.Node
    of_size: bool


def first_mixing(
    graph: fx.Graph, inputs: Iterable[fx.Node], outputs: Iterable[fx.Node], batch: Any
) -> Mixing | None:
    """The first thing of that kind that one of the outputs, as a number, depends on; None where there is none."""
    data, mixed, memory = set(inputs), dict[fx.Node, Mixing](), dict[int, Mixing]()
    for node in graph.nodes:
        read = [n for n in node.all_input_nodes if not is_model_of(n, node)]
        if not data.isdisjoint(read):
            data.add(node)
        counted = _as_numbers(node, read)
        found = next((mixed[n] for n in read if n in mixed and (n in counted or not mixed[n].of_size)), None)
        found = found or next((memory[m] for n in counted if (m := storage(n)) in memory), None)
        found = found or _own(node, data, batch)
        if found is not None:
            mixed[node] = found
            memory |= dict.fromkeys(written_memory(node), found)
    return next((mixed[n] for n in outputs if n in mixed and is_differentiable(value(n))), None)


def _own(node: fx.Node, data: set[fx.Node], batch: Any) -> Mixing | None:
    if node in data and _looks_at_all(node, data, batch):
        return Mixing(node, of_size=False)
    of_size = _takes_size(node, batch) or (node not in data and _counts(node, batch))
    return Mixing(node, of_size=True) if of_size else None


def _looks_at_all(node: fx.Node, data: set[fx.Node], batch: Any) -> bool:
    val = value(node)
    # a tuple is looked at where its parts are taken
    made_by = node.args[0] if node.target is operator.getitem else node
    read = [n for n in made_by.all_input_nodes if n in data and batch_dims(value(n), batch)]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    if not read:
        return False
    if isinstance(val, Tensor) and len(batch_dims(val, batch)) != 1:
        return True
    return _goes_along(node, batch)


# operations along a dimension in which every place looks at others
_ALONG = frozenset({
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "kthvalue", "median", "mode",
    "softmax", "_softmax", "log_softmax", "_log_softmax", "flip", "roll", "diff",
})  # fmt: skip


def _goes_along(node: fx.Node, batch: Any) -> bool:
    if not isinstance(node.target, OpOverload) or operation(node).removesuffix("_") not in _ALONG:
        return False
    named = by_name(node.target, node.args, node.kwargs)
    dims = named.get("dim", named.get("dims"))
    along = value(named["self"])
    chosen = range(along.dim()) if dims in (None, [], ()) else [dims] if isinstance(dims, int) else dims
    return not {d % max(1, along.dim()) for d in chosen}.isdisjoint(batch_dims(along, batch))


# what is made of the size of the batch where that is among what they are given
_RANGES = frozenset({"arange", "linspace", "eye", "scalar_tensor"})
_COUNTS = frozenset({"sum", "cumsum", "count_nonzero"})


def _takes_size(node: fx.Node, batch: Any) -> bool:
    """Whether a number that depends on the batch size takes part in arithmetic."""
    if not isinstance(node.target, OpOverload) or not isinstance(value(node), Tensor):
        return False
    numbers = torch.Tag.pointwise in node.target.tags or operation(node) in _RANGES
    return any(is_size(a, batch) for a, schema in bind(node) if numbers or schema.name == "fill_value")


def _counts(node: fx.Node, batch: Any) -> bool:
    """Whether numbers that are no example's are added up along the batch."""
    if not isinstance(node.target, OpOverload) or operation(node) not in _COUNTS:
        return False
    counted = batch_dims(value(node.args[0]), batch)  # pyright: ignore[reportArgumentType]
    return bool(counted) and (not batch_dims(value(node), batch) or _goes_along(node, batch))


# operands that are places, and not numbers that go into the result
_PLACES = frozenset({"indices", "index", "offsets", "repeats"})


def _as_numbers(node: fx.Node, read: list[fx.Node]) -> list[fx.Node]:
    """The operands whose values, and not only places that they stand for, go into the result."""
    if not isinstance(node.target, OpOverload):
        return read
    places = {n for argument, schema in bind(node) if schema.name in _PLACES for n in nodes_in(argument)}
    return [n for n in read if n not in places]
