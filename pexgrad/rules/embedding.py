"""Tables of rows: embeddings.

    y[b, t, :] = w[id[b, t], :]
    G[b, v, :] = sum over t with id[b, t] = v of g[b, t, :]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..factors import Scatter
from .registry import register_rule

aten = torch.ops.aten


@register_rule(aten.embedding.default, "weight")
def embedding_weight(
    g: Tensor, indices: Tensor, *, padding_idx: int, scale_grad_by_freq: bool, shape: torch.Size, dtype: torch.dtype
) -> Scatter:
    ids = indices.reshape(indices.shape[0], -1)
    g = g.reshape(*ids.shape, shape[1])
    if padding_idx >= 0:
        g = g.masked_fill((ids == padding_idx)[..., None], 0)
    if scale_grad_by_freq:
        g = g / (ids[:, :, None] == ids[:, None, :]).sum(2)[..., None]  # how often the id occurs in its own example
    return Scatter(g, ids, shape, dtype)
