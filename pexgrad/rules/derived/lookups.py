"""Rows of a table of parameters, the same for every example."""

from __future__ import annotations

import torch
from torch import Tensor

from ...factors import Broadcast, Factor, Rows, Scatter
from ..registry import register_pullback

aten = torch.ops.aten


def _looked_up(factor: Factor, ids: Tensor, shape: torch.Size) -> Factor | None:
    """To a table (v, *rest) whose rows `ids` are taken, the same for every example."""
    if not isinstance(factor, Broadcast) or not ids.numel():
        return None
    table, ids = int(shape[0]), ids.flatten() % int(shape[0])  # negative ids count from the end
    g = factor.summed().unflatten(1, (ids.shape[0], -1))  # (b, t, f)
    if ids.shape[0] < table:
        return Scatter(g, ids.expand(g.shape[0], -1), tuple(shape), factor.dtype)
    # no larger than what they are made of
    rows = g.new_zeros(g.shape[0], table, g.shape[2]).index_add(1, ids, g)
    return Rows(rows.reshape(g.shape[0], *shape).to(factor.dtype))


@register_pullback(aten.embedding.default, operand="weight")
def _embedded(
    factor: Factor, indices: Tensor, *, padding_idx: int, scale_grad_by_freq: bool, shape: torch.Size
) -> Factor | None:
    if padding_idx >= 0 or scale_grad_by_freq:  # whose gradients are other than the derivative
        return None
    return _looked_up(factor, indices, shape)


@register_pullback(aten.index_select.default)
def _selected(factor: Factor, index: Tensor, *, dim: int, shape: torch.Size) -> Factor | None:
    return _looked_up(factor, index, shape) if dim == 0 else None


@register_pullback(aten.index.Tensor)
def _indexed(factor: Factor, indices: list[Tensor | None], *, shape: torch.Size) -> Factor | None:
    first, *others = indices
    if first is None or first.dtype not in (torch.int64, torch.int32) or any(i is not None for i in others):
        return None
    return _looked_up(factor, first, shape)
