"""`squeeze` without the batch: in a batch of one it would take the batch's dimension away, and in no other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

aten = torch.ops.aten


def _squeezed(of_dims: Callable[..., Any], x: Tensor, dims: int | Sequence[int] | None = None) -> Any:
    """`x` without the dimensions of size 1 among these, or among all, of which none is the batch."""
    asked = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    if not x.dim() or not any(isinstance(x.shape[d], SymInt) for d in asked):
        return NotImplemented
    return of_dims(x, [d for d in asked if not isinstance(x.shape[d], SymInt) and x.shape[d] == 1])


# as a view, and in place
SQUEEZES = {
    overload: functools.partial(_squeezed, squeeze.dims)
    for squeeze in (aten.squeeze, aten.squeeze_)
    for overload in (squeeze.default, squeeze.dim, squeeze.dims)
}
