"""Joining the uses of one operand: factors that differ only in their positions become one along them, or their sum."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..base.fakes import is_recorded
from ..base.memory import storage_of
from ..base.numerics import accumulable, total
from ._base import Factor
from .broadcast import Broadcast
from .conv import Conv
from .outer import Outer
from .scatter import Scatter


def join(factors: Sequence[Factor]) -> list[Factor]:
    """Factors of one operand, joined along t where their other axes agree; those that are sums anyway, added."""
    groups: dict[Hashable, list[Factor]] = {}
    for f in factors:
        groups.setdefault(_signature(f), []).append(f)
    return [_joined(same) if len(same) > 1 else same[0] for same in groups.values()]


def _signature(f: Factor) -> Hashable:
    if isinstance(f, Broadcast):
        return Broadcast
    if isinstance(f, Outer | Scatter | Conv):
        return type(f), *(v.shape[2:] for v in f.held()), getattr(f, "geometry", None)
    return id(f)


def _joined(same: list[Any]) -> Factor:
    # the steps of a layer that runs backwards lie in memory the other way round
    if not is_recorded(same[0].g):
        same.sort(key=lambda f: f.g.storage_offset())
    return _added(same) if isinstance(same[0], Broadcast) else _cat(same)


def _added(same: list[Broadcast]) -> Broadcast:
    """Their sum, which is smaller than they are: a recurrent bias needs no copy of every step's cotangent."""
    wide = functools.reduce(torch.promote_types, (accumulable(f.g[:0]).dtype for f in same))
    spaced = _spaced([f.g for f in same])
    if spaced is not None and all(f.r is None for f in same):
        same = [replace(same[0], g=spaced)]
    return replace(same[0], g=total(f.summed(wide) for f in same).unsqueeze(1), r=None)


def _cat(same: list[Factor]) -> Factor:
    fields = {}
    for name in same[0].tensors:
        values = [getattr(f, name) for f in same]
        spaced = _spaced(values)
        fields[name] = torch.cat(values, 1) if spaced is None else spaced
    return replace(same[0], **fields)  # type: ignore[type-var]


def _spaced(values: Sequence[Tensor]) -> Tensor | None:
    """Single positions (b, 1, ...) along t as a view, where they lie equally spaced in one tensor, as a layer's steps do."""
    first = values[0]
    if is_recorded(first) or torch.is_grad_enabled() or any(not _alike(v, first) for v in values):
        return None
    offsets = [v.storage_offset() for v in values]
    step = offsets[1] - offsets[0]
    if step <= 0 or offsets != [offsets[0] + t * step for t in range(len(values))]:
        return None
    size = (first.shape[0], len(values), *first.shape[2:])
    return first.as_strided(size, (first.stride(0), step, *first.stride()[2:]))


def _alike(v: Tensor, first: Tensor) -> bool:
    same_memory = storage_of(v) == storage_of(first)
    same_place = v.shape == first.shape and v.stride() == first.stride() and v.dtype == first.dtype
    as_it_is = not v.is_conj() and not v.is_neg()
    return same_memory and same_place and as_it_is and v.shape[1] == 1
