"""The outer factor: row b is the sum over positions t of g[b,t] (x) x[b,t], for each of h heads or groups.

    G[b, h, o, i] = sum_t g[b, t, h, o] x[b, t, h, i]        reshaped to the operand's shape
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ._base import Factor


@dataclass(frozen=True, eq=False)
class Outer(Factor):
    """Linear maps, matrix products, recurrent gates."""

    g: Tensor  # (b, t, h, o)
    x: Tensor  # (b, t, h, i)
    shape: tuple[int, ...]  # numel = h o i
    dtype: torch.dtype

    @property
    def batch(self) -> int:
        return self.g.shape[0]

    def narrow(self, start: int, length: int) -> Outer:
        return Outer(
            self.g.narrow(0, start, length), self.x.narrow(0, start, length), self.shape, self.dtype
        )

    def rows(self) -> Tensor:
        g, x = rearrange(self.g, "b t h o -> b h o t"), rearrange(self.x, "b t h i -> b h t i")
        return torch.matmul(g, x).reshape(self.batch, *self.shape).to(self.dtype)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = rearrange(self.g * weights[:, None, None, None].to(self.g.dtype), "b t h o -> h o (b t)")
        x = rearrange(self.x, "b t h i -> h (b t) i")
        return torch.matmul(g, x).reshape(self.shape).to(self.dtype)
