"""Operations that look at all examples at once, found by the shapes in a graph, whatever the numbers are.

The probe runs a few examples, and sees what mixes them there. A gain for the whole batch that is 1 until a number is large, or an
expert that takes so many tokens of the batch, mixes only some batches. Such an operation is known by what it does to
the batch dimension:

- it takes values with the batch and gives one without, or one with two batch dimensions: `x.max()`, `z @ z.T`;
- it sorts, scans or turns along the batch: `cumsum(0)`, `roll(1, 0)`;
- it looks for each number among those of all examples, or adds them up beside it: `torch.isin(ids, seen)`,
  `torch.bucketize(x, x[:, 0])`, `torch.einsum("bi,ci->b", x, z)`;
- it does something else to some places in the batch: `h[2:]`, `h.triu()`, `h.index_fill(0, first, 0)`;
- the size of the batch, or an example's place in it, enters as a number: `h / len(h)`, `torch.arange(len(h))`, `table[:len(h)]`,
  `h[:, torch.arange(len(h))]`.

Where that reaches an output, an example's output is not its own. Picking by an index along the batch is left to the probe, as is
the place of an example where it serves as an index of the batch: `h[torch.arange(len(h)), last]` picks from each example.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..base.equations import written_out
from ..base.nodes import (
    batch_dims,
    bind,
    by_name,
    fold_factor_of,
    is_differentiable,
    is_model_of,
    is_size,
    nodes_in,
    operation,
    storage,
    value,
    written_memory,
)
from ..base.symbols import expression
from .along import SCANS, SLICES, WINDOWS, dims_of, names

aten = torch.ops.aten

# views of some places along a dimension
_PARTS = names("""
    slice select narrow split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk tensor_split unfold
    diagonal
""")
# something else is done to some places along a dimension, which an index names, or the operation itself
_AT = names("index_fill index_copy index_add index_reduce index_put put")
_SOME = _AT | names("triu tril fill_diagonal diagonal_scatter slice_scatter select_scatter")
# numbers are made of a size of the batch
_RANGES = names("arange linspace eye scalar_tensor")
# numbers are added up, or multiplied, along a dimension
_COUNTS = names("""
    sum cumsum count_nonzero nansum norm linalg_vector_norm logsumexp softmax log_softmax prod cumprod trace mm matmul dot
""")
# operands of which every place of the result looks at the whole, or at the whole of the last dimension
_SEARCHED = {"isin": "test_elements", "searchsorted": "sorted_sequence", "bucketize": "boundaries"}
# operands that are places, and not numbers that go into the result
_PLACES = names("indices index offsets repeats")


class Mixing(NamedTuple):
    """An operation that looks at all examples, or a number that depends on how many there are."""

    node: fx.Node
    of_size: bool


def first_mixing(
    graph: fx.Graph,
    inputs: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
    batch: Any,
    *,
    of_numbers: bool = True,
) -> Mixing | None:
    """The first thing of that kind that one of the outputs depends on, of numbers alone or of ids and conditions too."""
    data, mixed, memory = set(inputs), dict[fx.Node, Mixing](), dict[int, Mixing]()
    # memory that values have been put in: a cache, of which a call reads its own
    written = set[int | None]()
    for node in graph.nodes:
        read = [n for n in node.all_input_nodes if not is_model_of(n, node)]
        if not data.isdisjoint(read):
            data.add(node)
        counted = _as_numbers(node, read, batch)
        found = next((mixed[n] for n in read if n in mixed and (n in counted or not mixed[n].of_size)), None)
        found = found or next((memory[m] for n in counted if (m := storage(n)) in memory), None)
        found = found or _own(node, data, batch)
        if found is None and storage(node) not in written and _is_part_of_table(node, batch):
            found = Mixing(node, of_size=True)
        written |= written_memory(node)
        if found is not None:
            mixed[node] = found
            memory |= dict.fromkeys(written_memory(node), found)
    asked = (n for n in outputs if not of_numbers or is_differentiable(value(n)))
    found = (mixed.get(n) or memory.get(storage(n) or 0) for n in asked)
    return next(filter(None, found), None)


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
    return _goes_along(node, batch) or _is_part_of_batch(made_by, val, read, batch)


def _is_part_of_batch(made_by: Any, val: Any, read: list[fx.Node], batch: Any) -> bool:
    """Whether a view has some of the examples, and not some part of each: its size is no multiple of the batch's."""
    is_part = isinstance(val, Tensor) and operation(made_by) in _PARTS
    if not is_part or fold_factor_of(val, batch) is not None:
        return False
    return any(fold_factor_of(value(n), batch) is not None for n in read)


def _goes_along(node: fx.Node, batch: Any) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    name, named = operation(node).removesuffix("_"), by_name(node.target, node.args, node.kwargs)
    if (sizes := _windows(name, named, node)) is not None:
        val = value(node.args[0])  # pyright: ignore[reportArgumentType]
        return any(d >= val.dim() - len(sizes) and sizes[d - val.dim()] != 1 for d in batch_dims(val, batch))
    if name == "scaled_dot_product_attention":
        return value(named["key"]).dim() - 2 in batch_dims(value(named["key"]), batch)
    if name in _SEARCHED:
        return _is_searched(name, named.get(_SEARCHED[name]), batch)
    if name == "einsum":
        return _is_contracted(named, batch)
    if name not in SCANS | _SOME | SLICES:
        return False
    along = value(named["self"] if "self" in named else named["input"])
    indices = nodes_in(named.get("indices", named.get("index")))
    if name in _AT and any(batch_dims(value(n), batch) for n in indices):
        return False
    return not dims_of(name, named, along.dim()).isdisjoint(batch_dims(along, batch))


def _is_searched(name: str, operand: Any, batch: Any) -> bool:
    if not isinstance(operand, fx.Node):  # a number
        return False
    dims = batch_dims(value(operand), batch)
    return bool(dims) if name == "isin" else value(operand).dim() - 1 in dims


def _is_contracted(named: dict[str, Any], batch: Any) -> bool:
    """Whether an einsum adds up over the batch of one of its operands."""
    operands = [value(n) for n in named["tensors"]]
    terms, result = written_out(named["equation"], [v.dim() for v in operands])
    pairs = zip(terms, operands, strict=True)
    return any(letters[d] not in result for letters, v in pairs for d in batch_dims(v, batch))


def _windows(name: str, named: dict[str, Any], node: fx.Node) -> list[Any] | None:
    """The sizes of what moves along the last dimensions, or of what is put beside them: of one alone, each place is by itself."""
    if name in ("pad", "constant_pad_nd"):
        pads = named["pad"]
        return [1 + abs(pads[i]) + abs(pads[i + 1]) for i in range(0, len(pads), 2)][::-1]
    if name == "im2col":
        return named["kernel_size"]
    if name.startswith("grid_sampler"):  # the whole, at places that are data
        return [0] * (value(named["input"]).dim() - 2)
    if not (window := WINDOWS.fullmatch(name)):
        return None
    n = int(window[1])
    if "weight" in named:
        return list(value(named["weight"]).shape[2:])
    if "upsample" in name:
        old, new = (map(expression, value(v).shape[-n:]) for v in (node.args[0], node))  # pyright: ignore[reportArgumentType]
        return [int(a == b) for a, b in zip(old, new, strict=True)]
    sizes = named.get("kernel_size", [0])  # an adaptive one has the whole
    return sizes * n if len(sizes) == 1 else sizes


def _is_part_of_table(node: fx.Node, batch: Any) -> bool:
    """Whether the batch size says what part of a value without the batch is taken."""
    if not isinstance(node.target, OpOverload) or operation(node) not in _PARTS:
        return False
    of_table = not batch_dims(value(node.args[0]), batch)  # pyright: ignore[reportArgumentType]
    return of_table and any(is_size(a, batch) for a, _ in bind(node))


def _takes_size(node: fx.Node, batch: Any) -> bool:
    """Whether a number that depends on the batch size takes part in arithmetic."""
    if not isinstance(node.target, OpOverload) or not isinstance(value(node), Tensor):
        return False
    numbers = torch.Tag.pointwise in node.target.tags or operation(node) in _RANGES
    return any(is_size(a, batch) for a, schema in bind(node) if numbers or schema.name == "fill_value")


def _counts(node: fx.Node, batch: Any) -> bool:
    """Whether numbers that are no example's are added up along the batch, or changed at some places of it."""
    if not isinstance(node.target, OpOverload):
        return False
    if operation(node) not in _COUNTS:
        return operation(node).removesuffix("_") in _SOME and _goes_along(node, batch)
    counted = batch_dims(value(node.args[0]), batch)  # pyright: ignore[reportArgumentType]
    return bool(counted) and (not batch_dims(value(node), batch) or _goes_along(node, batch))


def _as_numbers(node: fx.Node, read: list[fx.Node], batch: Any) -> list[fx.Node]:
    """The operands whose values, and not only places among the examples that they stand for, go into the result."""
    if not isinstance(node.target, OpOverload):
        return read
    if node.target is aten.copy_.default:  # over whatever was there
        read = [n for n in read if n is not node.args[0]]
    counted = {n for a, schema in bind(node) for n in nodes_in(_without_places(a, schema.name, node, batch))}
    return [n for n in read if n in counted]


def _without_places(argument: Any, name: str, node: fx.Node, batch: Any) -> Any:
    """What is left of an operation's argument without what only says which examples are meant."""
    if name not in _PLACES:
        return argument
    first = next(nodes_in(node.args), None)
    if name not in ("indices", "index") or first is None:
        return ()
    val = value(first)
    batched = batch_dims(val, batch)
    if isinstance(argument, list | tuple):  # an index for each dimension; a mask may be for several
        masked = any(n.dtype in (torch.bool, torch.uint8) for n in map(value, nodes_in(argument)))
        return () if masked and batched else [n for i, n in enumerate(argument) if i not in batched]
    named = by_name(node.target, node.args, node.kwargs)
    along = range(val.dim()) if named.get("dim") is None else [named["dim"] % max(1, val.dim())]
    return () if any(d in batched for d in along) else argument
