"""Ways to look up rows of a table, as `embedding` and `table[ids]`, so that their rules apply.

embedding_bag   y[k, :] = sum over n in bag k of s[n] w[id[n], :]        an embedding, then a sum over each bag
take            y[...] = w.flatten()[id[...]]
index           y[..., id dims, ...] = w[:, i, j, :] = w'[i J + j] with the indexed dimensions of w' flattened into its first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

aten = torch.ops.aten

SUM, MEAN, MAX = 0, 1, 2


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = SUM,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:  # fmt: skip
    """Sums and means; a maximum stays as it is, for the exact fallback."""
    if mode == MAX:
        return NotImplemented
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=offsets.device)
    # of several bags that start at one place, the last is not empty
    bag = torch.searchsorted(starts, places, right=True) - 1
    rows = aten.embedding.default(weight, indices, -1, scale_grad_by_freq, False)
    counted = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx is not None:
        counted = (indices != padding_idx % weight.shape[0]).to(weight.dtype)
    scale = counted if per_sample_weights is None else counted * per_sample_weights
    size = weight.new_zeros(starts.shape[0]).index_add(0, bag, counted)
    total = weight.new_zeros(starts.shape[0], weight.shape[1]).index_add(0, bag, rows * scale[:, None])
    if mode == MEAN:
        total = total / size.clamp(min=1)[:, None]
    return total, bag, size.long(), starts


def take(x: Tensor, index: Tensor) -> Tensor:
    """`take` counts through the whole table."""
    return x.reshape(-1)[index]


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """A table indexed by examples' ids along one or more dimensions that are next to one another, as if along its first."""
    at = [d for d, i in enumerate(indices) if i is not None]
    ids = [i for i in indices if i is not None]
    # along the first dimension alone there is a rule already
    if not _is_table_lookup(x, ids) or at == [0] or at != list(range(at[0], at[-1] + 1)):
        return NotImplemented
    first, n = at[0], len(at)
    table = x.movedim(at, list(range(n)))
    flat, *others = (_places(i, size) for i, size in zip(ids, table.shape, strict=False))
    for place, size in zip(others, table.shape[1:], strict=False):
        flat = flat * size + place
    rows = table.flatten(0, n - 1)[flat]
    return rows.movedim(list(range(flat.dim())), list(range(first, first + flat.dim())))


def _places(ids: Tensor, size: int) -> Tensor:
    """Negative ids count from the end; one that is out of range is an error, as it is in torch."""
    return torch.arange(size, device=ids.device)[ids]


def _is_table_lookup(x: Tensor, ids: list[Tensor]) -> bool:
    """Whether the ids, and not the table, have the batch size in their shape."""
    integers = all(i.dtype in (torch.int32, torch.int64) for i in ids)
    sizes = [n for i in ids for n in i.shape]
    symbolic = any(isinstance(n, SymInt) for n in sizes)
    return integers and symbolic and 0 not in x.shape and not any(isinstance(n, SymInt) for n in x.shape)


LOOKUPS = {
    aten.embedding_bag.default: embedding_bag,
    aten.embedding_bag.padding_idx: embedding_bag,
    aten.take.default: take,
    aten.index.Tensor: index,
}
