"""`squeeze` without the batch: in a batch of one it would take the batch's dimension away, and in no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

aten = torch.ops.aten


def squeeze(x: Tensor) -> Any:
    """Every dimension of size 1."""
    return squeeze_dims(x, range(x.dim()))


def squeeze_dim(x: Tensor, dim: int) -> Any:
    """One, if its size is 1."""
    return squeeze_dims(x, [dim])


def squeeze_dims(x: Tensor, dims: Sequence[int]) -> Any:
    """Those of size 1 among them, of which none is the batch."""
    if not any(isinstance(x.shape[d], SymInt) for d in dims):
        return NotImplemented
    return aten.squeeze.dims(x, _fixed(x, dims))


def squeeze_(x: Tensor) -> Any:
    """The same in place."""
    return squeeze_dims_(x, range(x.dim()))


def squeeze_dim_(x: Tensor, dim: int) -> Any:
    """The same in place."""
    return squeeze_dims_(x, [dim])


def squeeze_dims_(x: Tensor, dims: Sequence[int]) -> Any:
    """The same in place."""
    if not any(isinstance(x.shape[d], SymInt) for d in dims):
        return NotImplemented
    return aten.squeeze_.dims(x, _fixed(x, dims))


def _fixed(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [d for d in dims if not isinstance(x.shape[d], SymInt) and x.shape[d] == 1]


SQUEEZES = {
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze_dim,
    aten.squeeze.dims: squeeze_dims,
    aten.squeeze_.default: squeeze_,
    aten.squeeze_.dim: squeeze_dim_,
    aten.squeeze_.dims: squeeze_dims_,
}
