"""Distances to points that are parameters: radial basis functions, prototypes, code books.

y[b, t, r] = |c[r] - x[b, t]|
G[b, r, i] = sum_t w[b, t, r] (c[r, i] - x[b, t, i])        w = g / y, zero where x meets c
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.nodes import value
from ..factors import Factor, Rows
from .registry import register_rule

aten = torch.ops.aten


def _to_points(operand: str, least: int) -> Any:
    """Euclidean distances to one set of points, of values with so many dimensions or more."""
    other = {"x1": "x2", "x2": "x1"}[operand]

    def holds(arguments: dict[str, Any]) -> bool:
        of, to = value(arguments[other]), value(arguments[operand])
        return arguments["p"] == 2 and set(to.shape[:-2]) <= {1} and of.dim() >= least

    return holds


@register_rule(aten.cdist.default, "x2", batch_dim=0, when=_to_points("x2", 2))
def cdist_points(g: Tensor, x1: Tensor, x2: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Rows:
    g, x = g.flatten(1, -2), x1.flatten(1, -2).to(g.dtype)  # (b, t, r), (b, t, i)
    c = x2.reshape(shape[-2:]).to(g.dtype)
    # cdist has no second derivative
    y = (x.unsqueeze(2) - c).norm(dim=-1) if torch.is_grad_enabled() else torch.cdist(x, c)
    origin = c.detach().mean(0)  # far from where they are, the difference of sums below would be rounding
    c, x = c - origin, x - origin
    meets = y == 0
    w = torch.where(meets, 0, g / torch.where(meets, 1, y))
    rows = w.mT * (c - x) if w.shape[1] == 1 else w.sum(1).unsqueeze(-1) * c - w.mT @ x
    return Rows(rows.reshape(-1, *shape).to(dtype))


@register_rule(aten.cdist.default, "x1", batch_dim=0, when=_to_points("x1", 3))
def cdist_points_first(g: Tensor, x1: Tensor, x2: Tensor, *, shape: torch.Size, dtype: torch.dtype) -> Factor:
    return cdist_points(g.mT, x2, x1, shape=shape, dtype=dtype)
