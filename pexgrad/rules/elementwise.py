"""Parameters that are expanded over the batch, which is also how every elementwise operation takes them.

y[b, ...] = p[...]        G[b] = g[b], summed over the dimensions along which p was repeated
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.numerics import channels_last
from ..factors import Broadcast
from .linear import together
from .registry import register_rule

aten = torch.ops.aten


@register_rule(aten.expand.default, "self")
def expand_self(g: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    """g (b, t, *rest), where rest is the expanded shape without its batch dimension."""
    rest = g.shape[2:]
    full = [1] * (len(rest) + 1 - len(shape)) + list(shape)
    own = full[:batch_dim] + full[batch_dim + 1 :]
    repeated = [2 + i for i, (n, m) in enumerate(zip(own, rest, strict=True)) if n != m]
    kept = [2 + i for i in range(len(rest)) if 2 + i not in repeated]
    g = g.permute(0, 1, *repeated, *kept).flatten(1, 1 + len(repeated))  # (b, t, *kept)
    return Broadcast(g.reshape(*g.shape[:2], shape.numel()), None, shape, dtype)


@register_rule(aten.prelu.default, "weight", batch_dim=0)
def prelu_weight(g: Tensor, self: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    g, x = (v.unsqueeze(2) if v.dim() == 2 else v for v in together(g, self))
    g, x = channels_last(g), channels_last(x)
    if shape.numel() == 1:  # one slope for all channels
        g, x = g.flatten(1)[..., None], x.flatten(1)[..., None]
    return Broadcast(g, x.clamp(max=0), shape, dtype)
