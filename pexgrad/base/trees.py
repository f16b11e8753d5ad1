"""Inputs and outputs as trees of tensors: flattening, batch sizes, and single examples.

`x` is a tensor (`model(x)`), a tuple (`model(*x)`) or a mapping (`model(**x)`); dataclasses anywhere in
a tree are taken apart field by field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import InputError


class _Record(NamedTuple):
    """An object taken apart, so that pytree sees its fields: a dataclass, or a mapping of a class of its own."""

    kind: type
    names: tuple[str, ...]
    fields: list[Any]


def _is_record(value: Any) -> bool:
    if isinstance(value, Tensor | type) or type(value) in pytree.SUPPORTED_NODES:
        return False
    return dataclasses.is_dataclass(value) or isinstance(value, Mapping)


def _open(tree: Any) -> Any:
    def open_record(leaf: Any) -> Any:
        if not _is_record(leaf):
            return leaf
        if isinstance(leaf, Mapping):
            return _Record(type(leaf), tuple(leaf), [_open(v) for v in leaf.values()])
        # what is no field may be a tensor with the batch too
        every = dict.fromkeys([*(f.name for f in dataclasses.fields(leaf)), *getattr(leaf, "__dict__", ())])
        names = tuple(name for name in every if hasattr(leaf, name))
        return _Record(type(leaf), names, [_open(getattr(leaf, name)) for name in names])

    return pytree.tree_map(open_record, tree, is_leaf=_is_record)


def _close(tree: Any) -> Any:
    def close_record(leaf: Any) -> Any:
        if not isinstance(leaf, _Record):
            return leaf
        values = dict(zip(leaf.names, map(_close, leaf.fields), strict=True))
        if issubclass(leaf.kind, Mapping):
            return leaf.kind(values)  # type: ignore[call-arg]
        copy = object.__new__(leaf.kind)
        for name, value in values.items():
            object.__setattr__(copy, name, value)
        return copy

    return pytree.tree_map(close_record, tree, is_leaf=lambda t: isinstance(t, _Record))


# the structures of nearly every call, whose walk would take as long as a small model's rules
_LEAF = pytree.tree_flatten(0)[1]
_ONE_ARGUMENT = pytree.tree_flatten(((0,), {}))[1]


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of `tree`, dataclasses included."""
    match tree:
        case Tensor():
            return [tree], _LEAF
        case ((Tensor() as x,), {**named}) if type(tree) is type(tree[0]) is tuple and not named:
            return [x], _ONE_ARGUMENT
    leaves, spec = pytree.tree_flatten(tree)
    if any(map(_is_record, leaves)):
        return pytree.tree_flatten(_open(tree))
    return leaves, spec


def unflatten(leaves: Iterable[Any], spec: pytree.TreeSpec) -> Any:
    """The inverse of `flatten`."""
    return _close(pytree.tree_unflatten(list(leaves), spec))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to every tensor."""
    leaves, spec = flatten(tree)
    return unflatten([fn(v) if isinstance(v, Tensor) else v for v in leaves], spec)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of `tree`, in order."""
    return [v for v in flatten(tree)[0] if isinstance(v, Tensor)]


def as_call(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`x` as the positional and keyword arguments of `model`."""
    if isinstance(x, Mapping):
        return (), dict(x)
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return x, {}
    return (x,), {}


def batch_size(x_leaves: list[Any], y_leaves: list[Any]) -> int:
    """The common size of dimension 0 of every tensor among the leaves of `x` and `y`."""
    found = [("x", t) for t in x_leaves if isinstance(t, Tensor)]
    if not found:
        raise InputError("x holds no tensor, so there is no batch")
    found += [("y", t) for t in y_leaves if isinstance(t, Tensor)]
    for where, t in found:
        if t.layout is not torch.strided or t.is_nested:
            kind = "nested" if t.is_nested else f"of layout {t.layout}"
            raise InputError(
                f"a tensor in {where} is {kind}, which has no slice for each example; pass a dense one"
            )
        if t.dim() == 0:
            raise InputError(f"a tensor in {where} has no dimensions; the batch must be its dimension 0")
    batch = found[0][1].shape[0]
    if any(t.shape[0] != batch for _, t in found):
        shapes = ", ".join(f"{where} {tuple(t.shape)}" for where, t in found)
        raise InputError(f"batch sizes disagree: {shapes}; every tensor needs the batch on dimension 0")
    return batch


def runs(batch: int, size: int) -> Iterator[slice]:
    """A batch in runs of at most `size` examples; an empty one is one empty run."""
    for start in range(0, batch, size) or range(1):
        yield slice(start, min(start + size, batch))


def examples(tree: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of every tensor in `tree`, still with a batch dimension."""
    return map_tensors(lambda t: t[start:stop], tree)
