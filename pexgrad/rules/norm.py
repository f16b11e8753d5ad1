"""Normalisation layers: y = n(x) * w + c, where n(x) is the normalised input.

    G_w[b] = sum_t g[b, t] n(x)[b, t],    G_c[b] = sum_t g[b, t]

n(x) is computed again from the input rather than kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.numerics import channels_last
from ..factors import Broadcast
from .conv import channel_bias
from .linear import together
from .registry import register_rule

aten = torch.ops.aten


def last_dims(g: Tensor, r: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    """g and r (b, *t, *shape)."""
    n = len(shape)
    if r is not None:
        g, r = together(g, r)
        r = r.flatten(-n).flatten(1, -2)
    return Broadcast(g.flatten(-n).flatten(1, -2), r, shape, dtype)


def channels(g: Tensor, r: Tensor, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    """g and r (b, t, c, *s)."""
    g, r = together(g, r)
    return Broadcast(channels_last(g), channels_last(r), shape, dtype)


@register_rule(aten.layer_norm.default, "weight")
def layer_norm_weight(
    g: Tensor, input: Tensor, *, eps: float, shape: torch.Size, dtype: torch.dtype
) -> Broadcast:
    return last_dims(g, F.layer_norm(input, shape, eps=eps), shape, dtype)


@register_rule(aten.layer_norm.default, "bias")
def layer_norm_bias(g: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    return last_dims(g, None, shape, dtype)


@register_rule(aten.rms_norm.default, "weight")
def rms_norm_weight(
    g: Tensor, input: Tensor, *, eps: float | None, shape: torch.Size, dtype: torch.dtype
) -> Broadcast:
    normal = F.rms_norm(input, shape, eps=eps).conj()  # alone among these it takes complex numbers
    if g.is_complex() and not dtype.is_complex:
        return last_dims((g * normal).real, None, shape, dtype)
    return last_dims(g, normal, shape, dtype)


@register_rule(aten.group_norm.default, "weight", batch_dim=0)
def group_norm_weight(
    g: Tensor, input: Tensor, *, num_groups: int, eps: float, shape: torch.Size, dtype: torch.dtype
) -> Broadcast:
    normal = F.group_norm(input.flatten(0, 1), num_groups, eps=eps).reshape(input.shape)
    return channels(g, normal, shape, dtype)


@register_rule(aten.instance_norm.default, "weight", batch_dim=0)
def instance_norm_weight(
    g: Tensor, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *,
    use_input_stats: bool, eps: float, shape: torch.Size, dtype: torch.dtype,
) -> Broadcast:  # fmt: skip
    if use_input_stats:
        normal = F.instance_norm(input.flatten(0, 1), eps=eps).reshape(input.shape)
    else:
        normal = _standardise(input, running_mean, running_var, eps)
    return channels(g, normal, shape, dtype)


@register_rule(aten.batch_norm.default, "weight", batch_dim=0)
def batch_norm_weight(
    g: Tensor, input: Tensor, running_mean: Tensor, running_var: Tensor, *,
    eps: float, shape: torch.Size, dtype: torch.dtype,
) -> Broadcast:  # fmt: skip
    return channels(g, _standardise(input, running_mean, running_var, eps), shape, dtype)


def _standardise(x: Tensor, mean: Any, var: Any, eps: float) -> Tensor:
    """x (b, t, c, *s) by the running statistics of its channels."""
    column = (-1, *[1] * (x.dim() - 3))
    return (x - mean.reshape(column)) * (var + eps).rsqrt().reshape(column)


for operation in (aten.group_norm.default, aten.instance_norm.default, aten.batch_norm.default):
    register_rule(operation, "bias", batch_dim=0)(channel_bias)
