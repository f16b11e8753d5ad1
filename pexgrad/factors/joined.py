"""Joining the uses of one operand: factors that differ only in their positions become one along them, or their sum."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from ._base import Factor, accumulable, total
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
    if isinstance(f, Outer):
        return Outer, f.g.shape[2:], f.x.shape[2:]
    if isinstance(f, Scatter):
        return Scatter, f.g.shape[2:]
    if isinstance(f, Broadcast):
        return Broadcast
    if isinstance(f, Conv):
        return Conv, f.g.shape[2:], f.x.shape[2:], f.geometry
    return id(f)


def _joined(same: list[Factor]) -> Factor:
    return _added(same) if isinstance(same[0], Broadcast) else _cat(same)  # type: ignore[arg-type]


def _added(same: list[Broadcast]) -> Broadcast:
    """Their sum, which is smaller than they are: a recurrent bias needs no copy of every step's cotangent."""
    wide = functools.reduce(torch.promote_types, (accumulable(f.g[:0]).dtype for f in same))
    return replace(same[0], g=total(f.summed(wide) for f in same).unsqueeze(1), r=None)


def _cat(same: list[Factor]) -> Factor:
    fields = {}
    for name in ("g", "x", "r", "ids"):
        values = [getattr(f, name, None) for f in same]
        if values[0] is not None:
            fields[name] = torch.cat(values, 1)  # pyright: ignore[reportArgumentType]
    return replace(same[0], **fields)  # type: ignore[type-var]
