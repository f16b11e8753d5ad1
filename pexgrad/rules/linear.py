"""Linear maps and matrix products.

y[b, t, o] = sum_i w[o, i] x[b, t, i] + c[o]
G_w[b, o, i] = sum_t g[b, t, o] x[b, t, i],    G_c[b, o] = sum_t g[b, t, o]
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from ..factors import Broadcast, Outer
from .registry import register_rule

aten = torch.ops.aten


def together(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes: under autocast they differ."""
    if g.dtype == x.dtype:
        return g, x
    dtype = torch.promote_types(g.dtype, x.dtype)
    return g.to(dtype), x.to(dtype)


def outer(g: Tensor, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Outer:
    """g (b, *t, o) and x (b, *t, i) as a factor of rows (b, o, i)."""
    g, x = (v.flatten(1, -2).unsqueeze(2) for v in together(g, x.conj()))  # (b, t, 1, o), (b, t, 1, i)
    return Outer(g, x, shape, dtype)


@register_rule(aten.linear.default, "weight")
def linear_weight(g: Tensor, input: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Outer:
    return outer(g, input, shape, dtype)


@register_rule(aten.linear.default, "bias")
@register_rule(aten.bilinear.default, "bias")
def linear_bias(g: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    return Broadcast(g.flatten(1, -2), None, shape, dtype)


@register_rule(aten.bilinear.default, "weight")
def bilinear_weight(
    g: Tensor, input1: Tensor, input2: Tensor, *, shape: torch.Size, dtype: torch.dtype
) -> Outer:
    pairs = rearrange(input1, "b ... i -> b ... i 1") * rearrange(input2, "b ... j -> b ... 1 j")
    return outer(g, pairs.flatten(-2), shape, dtype)
