"""Parameters that are expanded over the batch, which is also how every elementwise operation takes them.

y[b, ...] = p[...]        G[b] = g[b], summed over the dimensions along which p was repeated
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.numerics import channels_last
from ..factors import Broadcast, repeats_as_positions
from .linear import together
from .registry import register_rule

aten = torch.ops.aten


@register_rule(aten.expand.default, "self")
def expand_self(g: Tensor, *, batch_dim: int, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    """g (b, t, *rest), where rest is the expanded shape without its batch dimension."""
    full = [1] * (g.dim() - 1 - len(shape)) + list(shape)
    own = full[:batch_dim] + full[batch_dim + 1 :]
    return Broadcast(repeats_as_positions(g, own), None, shape, dtype)


@register_rule(aten.prelu.default, "weight", batch_dim=0)
def prelu_weight(g: Tensor, self: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Broadcast:
    g, x = (v.unsqueeze(2) if v.dim() == 2 else v for v in together(g, self))
    g, x = channels_last(g), channels_last(x)
    if shape.numel() == 1:  # one slope for all channels
        g, x = g.flatten(1)[..., None], x.flatten(1)[..., None]
    return Broadcast(torch.where(x > 0, 0, g), x, shape, dtype)
