"""Operations that only a trace below autograd meets, as simpler ones that have rules and can be differentiated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from ..base.numerics import accumulable
from .backward import BACKWARD
from .lookups import LOOKUPS

aten = torch.ops.aten


def convolution_backward(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradient in the input alone: the transposed convolution, or the plain one of a transposed one."""
    if list(wanted) != [True, False, False]:
        return NotImplemented
    excess = [0] * len(stride)
    if not transposed:  # positions at the end of x that no window has reached
        sizes = zip(x.shape[2:], g.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        excess = [n - ((m - 1) * s - 2 * p + e * (k - 1) + 1) for n, m, k, s, p, e in sizes]
    of_x = aten.convolution(g, weight, None, stride, padding, dilation, not transposed, excess, groups)
    return of_x, None, None


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    """The normalised values, scaled and shifted; the mean and 1 / std."""
    return _normalised(x, list(range(-len(shape), 0)), eps, weight, bias)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: int, size: Any, group: int, eps: float
) -> Any:
    """The same over the channels of each group."""
    channels = [1, group, c // group] + [1] * (x.dim() - 2)
    scale, shift = (None if p is None else p.reshape(channels) for p in (weight, bias))
    apart = x.reshape(n, group, c // group, *x.shape[2:])
    y, mean, rstd = _normalised(apart, list(range(2, apart.dim())), eps, scale, shift)
    return y.reshape(x.shape), mean.reshape(n, group), rstd.reshape(n, group)


def _normalised(x: Tensor, dims: list[int], eps: float, scale: Tensor | None, shift: Tensor | None) -> Any:
    wide = accumulable(x)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = centred * rstd
    y = y if scale is None else y * scale
    y = y if shift is None else y + shift
    return y.to(x.dtype), mean, rstd


BELOW = {
    **LOOKUPS,
    **BACKWARD,
    **get_decompositions([aten.native_layer_norm_backward, aten.native_group_norm_backward]),
    aten.convolution_backward.default: convolution_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_group_norm.default: group_norm,
    aten.detach.default: aten.alias.default,  # autograd detaches what it keeps for a backward
}
