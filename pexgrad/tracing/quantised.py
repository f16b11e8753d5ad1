"""Fake quantisation written out in simple operations: torch's own kernels have no shape function for a symbolic batch size.

    q = round(x / s) + z    y = s (clamp(q, low, high) - z)    dL/dx = dL/dy where low <= q <= high, 0 elsewhere

The scale s is a number in float32 as in the kernels, whatever x is in, and so is y with one scale for all. Half precision is left
to the kernels, which round it at other places.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from ..base.numerics import is_half

aten = torch.ops.aten


def per_tensor(x: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> Any:
    """With one scale and zero point, numbers or tensors of one number."""
    if is_half(x.dtype):
        return NotImplemented
    scale = scale.float() if isinstance(scale, Tensor) else _in_float32(scale)
    inverse = scale.reciprocal() if isinstance(scale, Tensor) else _in_float32(1 / scale)
    return _quantised(x, scale, inverse, zero_point, low, high, torch.float32)


def per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int) -> Any:
    """With one of each along a dimension."""
    if is_half(x.dtype):
        return NotImplemented
    shape = [-1 if d == axis else 1 for d in range(x.dim())]
    scale, zero_point = scale.float().view(shape), zero_point.view(shape)
    return _quantised(x, scale, scale.reciprocal(), zero_point, low, high, x.dtype)


def _quantised(
    x: Tensor, scale: Any, inverse: Any, zero_point: Any, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    # a zero point that is no integer is added before rounding
    is_float = isinstance(zero_point, Tensor) and zero_point.is_floating_point()
    q = (x * inverse + zero_point).round() if is_float else (x * inverse).round() + zero_point
    y = ((q.clamp(low, high) - zero_point).to(dtype) * scale).to(x.dtype)
    inside = (q >= low) & (q <= high)
    return y.detach() + torch.where(inside, x - x.detach(), 0)  # which is zero, but has a gradient


def _in_float32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


QUANTISED = {
    aten.fake_quantize_per_tensor_affine.default: per_tensor,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: per_tensor,
    aten.fake_quantize_per_channel_affine.default: per_channel,
}
