"""The scatter factor: g[b,t] is added at row id[b,t] of a table.

    G[b, v, :] = sum over t with id[b, t] = v of g[b, t, :]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import Factor


@dataclass(frozen=True, eq=False)
class Scatter(Factor):
    """Embeddings and indexed parameters."""

    g: Tensor  # (b, t, f)
    ids: Tensor  # (b, t), in [0, v)
    shape: tuple[int, ...]  # (v, *rest), numel of rest = f
    dtype: torch.dtype

    @property
    def batch(self) -> int:
        return self.g.shape[0]

    def narrow(self, start: int, length: int) -> Scatter:
        return Scatter(
            self.g.narrow(0, start, length), self.ids.narrow(0, start, length), self.shape, self.dtype
        )

    def rows(self) -> Tensor:
        v = self.shape[0]
        example = torch.arange(self.batch, device=self.ids.device)[:, None] * v
        table = self.g.new_zeros(self.batch * v, self.g.shape[2])
        table = table.index_add(0, (example + self.ids).flatten(), self.g.flatten(0, 1))
        return table.reshape(self.batch, *self.shape).to(self.dtype)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = self.g * weights[:, None, None].to(self.g.dtype)
        table = g.new_zeros(self.shape[0], g.shape[2])
        return table.index_add(0, self.ids.flatten(), g.flatten(0, 1)).reshape(self.shape).to(self.dtype)
