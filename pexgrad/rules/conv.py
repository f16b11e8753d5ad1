"""Convolutions, plain and transposed, over 1, 2 and 3 spatial dimensions.

The weight's rule is the convolution factor (see `factors/conv.py`). A transposed convolution is the
transpose of a convolution from its output to its input, so input and cotangent change places.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.numerics import channels_last
from ..factors import Broadcast, Conv, Geometry
from .linear import together
from .registry import register_rule

aten = torch.ops.aten

PLAIN = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def each(setting: Any, n: int) -> tuple[int, ...]:
    """A setting for each of n dimensions: one number stands for all."""
    numbers = [setting] if isinstance(setting, int) else list(setting)
    return tuple(numbers * n if len(numbers) == 1 else numbers)


def explicit_padding(
    x: Tensor, padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, Any]:
    """Padding as numbers; what `same` adds on one side only is added to x (..., *s) itself."""
    n = len(kernel)
    if not isinstance(padding, str):
        return x, each(padding, n)
    if padding == "valid":
        return x, (0,) * n
    totals = [e * (k - 1) for k, e in zip(kernel, dilation, strict=True)]
    extra = [p for t in reversed(totals) for p in (0, t % 2)]  # the odd one goes to the right
    return (F.pad(x, extra) if any(extra) else x), tuple(t // 2 for t in totals)


def conv_weight(
    g: Tensor, input: Tensor, *, stride: Any, padding: Any, dilation: Any, groups: int,
    shape: torch.Size, dtype: torch.dtype, conv_rule: str,
) -> Conv:  # fmt: skip
    kernel, n = tuple(shape[2:]), len(shape) - 2
    g, x = together(g, input.conj())
    x, padding = explicit_padding(x, padding, kernel, each(dilation, n))
    geometry = Geometry(kernel, each(stride, n), padding, each(dilation, n), groups)
    return Conv(x, g, geometry, shape, dtype, conv_rule)


def conv_transpose_weight(
    g: Tensor, input: Tensor, *, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int,
    shape: torch.Size, dtype: torch.dtype, conv_rule: str,
) -> Conv:  # fmt: skip
    n = len(shape) - 2
    g, x = together(g, input.conj())
    padding, excess = each(padding, n), each(output_padding, n)
    if any(excess):  # positions that the output has in excess take padding's place on the right
        sides = zip(reversed(padding), reversed(excess), strict=True)
        g = F.pad(g, [side for p, e in sides for side in (p, p - e)])
        padding = (0,) * n
    geometry = Geometry(tuple(shape[2:]), each(stride, n), padding, each(dilation, n), groups)
    return Conv(g, x, geometry, shape, dtype, conv_rule)


def channel_bias(g: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    return Broadcast(channels_last(g), None, shape, dtype)


@register_rule(aten.convolution.default, "weight", batch_dim=0)
def convolution_weight(
    g: Tensor, input: Tensor, *, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
    groups: int, shape: torch.Size, dtype: torch.dtype, conv_rule: str,
) -> Conv:  # fmt: skip
    """Either of them, by the name that they have below autograd."""
    transpose = functools.partial(conv_transpose_weight, output_padding=output_padding)
    return (transpose if transposed else conv_weight)(
        g, input, stride=stride, padding=padding, dilation=dilation, groups=groups,
        shape=shape, dtype=dtype, conv_rule=conv_rule,
    )  # fmt: skip


register_rule(aten.convolution.default, "bias", batch_dim=0)(channel_bias)
for operation in PLAIN:
    register_rule(operation, "weight", batch_dim=0)(conv_weight)
for operation in TRANSPOSED:
    register_rule(operation, "weight", batch_dim=0)(conv_transpose_weight)
for operation in PLAIN + TRANSPOSED:
    register_rule(operation, "bias", batch_dim=0)(channel_bias)
