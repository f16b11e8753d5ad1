"""Tables of rows: embeddings, and parameters indexed by values that belong to examples.

y[b, t, :] = w[id[b, t], :]
G[b, v, :] = sum over t with id[b, t] = v of g[b, t, :]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..base.nodes import value
from ..errors import InputError
from ..factors import Scatter
from .registry import register_rule

aten = torch.ops.aten


@register_rule(aten.embedding.default, "weight")
def embedding_weight(
    g: Tensor,
    indices: Tensor,
    *,
    padding_idx: int,
    scale_grad_by_freq: bool,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Scatter:
    ids = indices.reshape(indices.shape[0], -1)
    g = g.reshape(*ids.shape, shape[1])
    if padding_idx >= 0:
        g = g.masked_fill((ids == padding_idx)[..., None], 0)
    if scale_grad_by_freq:
        if torch.is_grad_enabled() and g.requires_grad:
            raise InputError(
                "an embedding with scale_grad_by_freq has gradients that are not the derivative of its output, so that theirs "
                "(create_graph=True) are not defined; switch one of the two off"
            )
        # how often each id occurs in its own example
        g = g / (ids[:, :, None] == ids[:, None, :]).sum(2)[..., None]
    return Scatter(g, ids, shape, dtype)


def _one_leading_index(arguments: dict[str, Any]) -> bool:
    """`table[ids]`: integers that index the first dimension alone."""
    first, *others = arguments["indices"]
    integers = isinstance(first, fx.Node) and value(first).dtype in (torch.int64, torch.int32)
    return integers and all(i is None for i in others)


@register_rule(aten.index.Tensor, "self", when=_one_leading_index)
def index_self(g: Tensor, indices: list[Tensor], *, shape: torch.Size, dtype: torch.dtype) -> Scatter:
    return _looked_up(g, indices[0] % max(1, shape[0]), shape, dtype)  # negative ids count from the end


@register_rule(aten.index_select.default, "self", batch_dim=0, when=lambda arguments: arguments["dim"] == 0)
def index_select_self(g: Tensor, index: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Scatter:
    return _looked_up(g, index, shape, dtype)


def _looked_up(g: Tensor, ids: Tensor, shape: torch.Size, dtype: torch.dtype) -> Scatter:
    """g (b, t, *s, *rest) and ids (b, t, *s) of a table (v, *rest)."""
    ids = ids.reshape(ids.shape[0], -1)
    return Scatter(g.reshape(*ids.shape, shape[1:].numel()), ids, shape, dtype)
