"""Views of fake tensors, told by plain arithmetic: their sizes and strides, and where in memory they begin.

None where that takes a question about the batch size, which torch's own functions ask, or where arguments do not fit; a dimension
that there is not is an `IndexError`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .symbols import are_same

aten = torch.ops.aten

Place = tuple[list[Any], list[Any], Any]  # sizes, strides, storage offset


def _place(x: Tensor) -> Place:
    return [*x.shape], [*x.stride()], x.storage_offset()


def _permuted(x: Tensor, dims: Sequence[int]) -> Place | None:
    shape, strides, offset = _place(x)
    if sorted(dims) != [*range(x.dim())]:
        return None
    return [shape[d] for d in dims], [strides[d] for d in dims], offset


def _transposed(x: Tensor, one: int, other: int) -> Place | None:
    dims = [*range(x.dim())]
    dims[one], dims[other] = dims[other], dims[one]
    return _permuted(x, dims)


def _unsqueezed(x: Tensor, dim: int) -> Place | None:
    shape, strides, offset = _place(x)
    if not -len(shape) - 1 <= dim <= len(shape):
        return None
    at = dim % (len(shape) + 1)
    step = shape[at] * strides[at] if at < len(shape) else 1
    return [*shape[:at], 1, *shape[at:]], [*strides[:at], step, *strides[at:]], offset


def _expanded(x: Tensor, sizes: Sequence[Any], implicit: bool = False) -> Place | None:
    shape, strides, offset = _place(x)
    new = len(sizes) - len(shape)
    if new < 0 or any(_is_open(n) for n in sizes[:new]):
        return None
    out = [*sizes[:new], *shape], [0] * new + strides, offset
    for i, (n, wanted) in enumerate(zip(shape, sizes[new:], strict=True), new):
        if _is_open(wanted) or are_same([n], [wanted]):
            continue
        if type(n) is not int or n != 1:
            return None
        out[0][i], out[1][i] = wanted, 0
    return out


def _selected(x: Tensor, dim: int, index: Any) -> Place | None:
    shape, strides, offset = _place(x)
    n, stride = shape.pop(dim), strides.pop(dim)
    known = type(n) is int and type(index) is int and -n <= index < n
    return (shape, strides, offset + index % n * stride) if known else None


def _sliced(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Place | None:
    shape, strides, offset = _place(x)
    if start in (None, 0) and end in (None, sys.maxsize) and step == 1:
        return shape, strides, offset
    n = shape[dim]
    if any(type(k) not in (int, type(None)) for k in (n, start, end, step)) or step < 1:
        return None
    kept = range(n)[start:end:step]
    offset = offset + kept.start * strides[dim]
    shape[dim], strides[dim] = len(kept), strides[dim] * step
    return shape, strides, offset


def _is_open(size: Any) -> bool:
    return type(size) is int and size == -1


PLACES: dict[Any, Callable[..., Place | None]] = {
    aten.permute.default: _permuted,
    aten.transpose.int: _transposed,
    aten.t.default: lambda x: _permuted(x, [*range(x.dim())][::-1]) if x.dim() <= 2 else None,
    aten.unsqueeze.default: _unsqueezed,
    aten.expand.default: _expanded,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
}
