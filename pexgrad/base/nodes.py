"""What a node of a traced graph says of itself: its value's sizes and memory, its operands, and a name for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .memory import storage_of
from .numerics import is_inexact
from .symbols import expression

aten = torch.ops.aten

# running statistics that the schema does not declare as written to
_HIDDEN_WRITES = {aten.instance_norm.default: ("running_mean", "running_var")}


# what they make has the shape of their operand, and nothing of its data
_LIKE = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.new_empty.default,
}  # fmt: skip
_SIZES = {aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int, aten.sym_storage_offset.default}
_AS = {
    aten.type_as.default, aten.expand_as.default, aten.view_as.default, aten.reshape_as.default,
    aten.to.other,
}  # fmt: skip


def is_model_of(operand: fx.Node, node: fx.Node) -> bool:
    """Whether an operation takes nothing but the shape, or the dtype, of an operand."""
    if node.target in _SIZES:
        return True
    return (node.target in _LIKE and operand is node.args[0]) or (
        node.target in _AS and operand is not node.args[0]
    )


def value(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta.get("val")


def has_batch(size: Any, batch: Any) -> bool:
    """Whether a symbolic size contains the batch size."""
    return isinstance(size, torch.SymInt | torch.SymFloat) and batch in expression(size).free_symbols


def is_size(argument: Any, batch: Any) -> bool:
    """Whether an argument is a number that depends on the batch size."""
    return has_batch(value(argument) if isinstance(argument, fx.Node) else argument, batch)


def sizes_in(node: fx.Node, batch: Any) -> bool:
    """Whether an operation is given a number that depends on the batch size."""
    return any(is_size(a, batch) for a in pytree.tree_leaves((node.args, node.kwargs)))


def batch_dims(val: Any, batch: Any) -> tuple[int, ...]:
    """The dimensions of a fake tensor whose size contains the batch size."""
    if not isinstance(val, Tensor):
        return ()
    return tuple(i for i, n in enumerate(val.shape) if has_batch(n, batch))


def is_of_batch(val: Any, batch: Any) -> bool:
    """Whether a fake value, or one among several, has the batch size in its shape."""
    if isinstance(val, tuple | list):
        return any(is_of_batch(v, batch) for v in val)
    return bool(batch_dims(val, batch))


def fold_factor_of(val: Any, batch: Any) -> int | None:
    """k where a fake tensor has one batch dimension, of size k times the batch size; None elsewhere."""
    dims = batch_dims(val, batch)
    if len(dims) != 1:
        return None
    factor = expression(val.shape[dims[0]]) / batch
    return int(factor) if factor.is_number and factor.is_integer else None


def storage(node: fx.Node) -> int | None:
    """An identity of the memory behind a node's value, shared by its views."""
    val = value(node)
    return storage_of(val) if isinstance(val, Tensor) else None


# key in a node's meta: which of its input nodes a function that is not torch's has written to
WRITES = "writes"


def mutated_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that an in-place operation writes to."""
    if not isinstance(node.target, OpOverload):
        yield from (node.all_input_nodes[i] for i in node.meta.get(WRITES, ()))
        return
    for argument, schema in bind(node):
        declared = schema.alias_info is not None and schema.alias_info.is_write
        if declared or schema.name in _HIDDEN_WRITES.get(node.target, ()):
            yield from nodes_in(argument)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Leave out what nobody uses, and what writes to nothing."""
    graph.eliminate_dead_code(lambda n: n.is_impure() or bool(n.meta.get(WRITES)))


class Writes:
    """Where a graph writes to memory, by the place of its nodes when this was made."""

    def __init__(self, graph: fx.Graph):
        self._place = {n: i for i, n in enumerate(graph.nodes)}
        self._last = {storage(t): self._place[n] for n in graph.nodes for t in mutated_operands(n)}

    def ever(self, node: fx.Node) -> bool:
        """Whether the memory of a node's value is written to anywhere."""
        return storage(node) in self._last

    def behind(self, node: fx.Node, at: fx.Node) -> bool:
        """Whether the memory of a node's value is written to behind another node."""
        return self._last.get(storage(node), -1) > self._place[at]

    def by_or_behind(self, node: fx.Node, at: fx.Node) -> bool:
        """The same, where that other node itself may be the one that writes."""
        return self._last.get(storage(node), -1) >= self._place[at]


def bind(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Each argument that an operation is given, with its declaration."""
    schema = node.target._schema.arguments  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    yield from zip(node.args, schema, strict=False)
    declared = {s.name: s for s in schema}
    yield from ((v, declared[k]) for k, v in node.kwargs.items() if k in declared)


def by_name(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of an ATen operation by its name in the schema, defaults included."""
    schema = operation._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def draws(operation: Any) -> bool:
    """Whether an operation draws random numbers."""
    return isinstance(operation, OpOverload) and torch.Tag.nondeterministic_seeded in operation.tags


def written_memory(node: fx.Node) -> set[int]:
    """The memory that an in-place operation writes to."""
    return {m for n in mutated_operands(node) if (m := storage(n)) is not None}


def put_behind(
    node: fx.Node, target: Any, *further: Any, after: fx.Node | None = None, **settings: Any
) -> fx.Node:
    """An operation on a node, behind it or behind a later one, that everything else now uses in the node's place."""
    with node.graph.inserting_after(after or node):
        new = node.graph.call_function(target, (node, *further), settings)
    new.meta.update(node.meta)  # the fake value too: the same memory, as far as anyone asks
    use_instead(new, node)
    return new


def use_instead(new: fx.Node, node: fx.Node) -> None:
    """Let everything but `new` itself use it in a node's place."""
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def returned(graph: fx.Graph) -> Any:
    """What a graph returns."""
    return graph.output_node().args[0]


def nodes_in(argument: Any) -> Iterator[fx.Node]:
    """The nodes anywhere in an argument."""
    found: list[fx.Node] = []
    map_arg(argument, lambda n: found.append(n) or n)
    yield from found


def is_differentiable(val: Any) -> bool:
    """Whether a fake value is, or holds, a floating or complex tensor."""
    if isinstance(val, tuple | list):
        return any(map(is_differentiable, val))
    return isinstance(val, Tensor) and is_inexact(val)


def source(node: fx.Node) -> str:
    """The user's line that a node comes from, for a message."""
    return node.meta.get("source") or "an unknown line"


def where(node: fx.Node) -> str:
    """A node for a message: operation, module path, and the user's line."""
    path, source = node.meta.get("path", ""), node.meta.get("source", "")
    return operation(node) + (f" in module '{path}'" if path else "") + (f" at {source}" if source else "")


def operation(node: fx.Node) -> str:
    """The short name of a node's operation: `conv2d`, `add_`."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))
