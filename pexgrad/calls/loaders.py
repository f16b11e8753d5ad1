"""Batches of a loader as pairs (x, y) on the device of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..base import trees
from ..errors import InputError

Unpack = Callable[[Any], tuple[Any, Any]]


def pairs(loader: Iterable[Any], params: Any, unpack: Unpack | None = None) -> Iterator[tuple[Any, Any]]:
    """(x, y) of each batch: a pair (x, y), or (x,), or x alone; `unpack` turns any other kind into a pair."""
    device = next((t.device for t in pytree.tree_leaves(params) if isinstance(t, Tensor)), None)
    for batch in loader:
        x, y = (unpack or _pair)(batch)
        yield tuple(trees.map_tensors(lambda t: t.to(device), tree) for tree in (x, y))  # pyright: ignore[reportReturnType]


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple):
        return batch, None
    if not 1 <= len(batch) <= 2:
        raise InputError(
            f"a batch of {len(batch)} parts is neither (x, y) nor (x,); let the loader give pairs, or say which part is what "
            "with over_loader(..., unpack=)"
        )
    return (batch[0], batch[1]) if len(batch) == 2 else (batch[0], None)
