"""The outer factor: row b is the sum over positions t of g[b,t] (x) x[b,t], for each of h heads or groups.

G[b, h, o, i] = sum_t g[b, t, h, o] x[b, t, h, i]        reshaped to the operand's shape
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from ..base.doubts import answers, may_ask
from ..base.numerics import accumulable, gather, in_range, into, multiple, real, square, weighted_pair
from ._base import BLOCK_BYTES, Factor
from .balance import balance, cancels, sizes
from .norm_cost import NormCost, of_outer


@dataclass(frozen=True, eq=False)
class Outer(Factor):
    """Linear maps, matrix products, recurrent gates."""

    g: Tensor  # (b, t, h, o)
    x: Tensor  # (b, t, h, i)
    shape: tuple[int, ...]  # numel = h o i
    dtype: torch.dtype

    tensors = "g", "x"

    def rows(self, out: Tensor | None = None) -> Tensor:
        b, t, h, o = self.g.shape
        # ((b h), o, t), ((b h), t, i)
        g, x = self.g.movedim(1, -1).flatten(0, 1), self.x.movedim(1, -2).flatten(0, 1)
        # a plain product's own backward would go through the rows twice
        multiply = torch.mul if t == 1 and not torch.is_grad_enabled() else torch.bmm
        if out is None or out.dtype != g.dtype or not out.is_contiguous():
            return into(out, multiply(g, x).reshape(b, *self.shape).to(self.dtype))
        multiply(g, x, out=out.view(b * h, o, x.shape[-1]))
        return out

    @property
    def is_of_matrices(self) -> bool:
        """Whether rows are (o, i), or (h, o, i) for the heads."""
        own = (*self.g.shape[2:], self.x.shape[3])
        return tuple(self.shape) == own or (own[0] == 1 and tuple(self.shape) == own[1:])

    def scaled(self, m: Tensor) -> Outer | None:
        m = m[(None,) * (len(self.shape) - m.dim())]
        if not self.is_of_matrices or 1 not in m.shape[-2:]:
            return None
        wide = self.mapped(accumulable)
        if m.shape[-1] == 1:
            return replace(wide, g=multiple(wide.g, m.squeeze(-1)))
        return replace(wide, x=multiple(wide.x, m.squeeze(-2)))

    def dots_along(self, m: Tensor, dim: int) -> Tensor | None:
        if not self.is_of_matrices or len(self.shape) != 2:
            return None
        along, across = (
            accumulable(v[:, :, 0]) for v in ((self.g, self.x) if dim == 0 else (self.x, self.g))
        )
        m = m.to(along.dtype)
        return (along * (across @ (m.mT if dim == 0 else m))).sum(1)

    def algorithm(self) -> str:
        return "outer product" if self.g.shape[1] == 1 else "batched matrix product"

    def balanced(self) -> Outer:
        g, x = balance(self.g, self.x)
        return replace(self, g=g, x=x)

    def norm_cost(self) -> NormCost:
        numbers = self.batch * self.row_numel
        return of_outer(self.g.shape[1], self.g.shape[3], self.x.shape[3], numbers)

    def sq_norms(self) -> Tensor:
        if self.norm_cost().is_product:
            return _products_of_norms(self.g, self.x).flatten(1).sum(1)
        return super().sq_norms()

    def squares_of_parts(self, sq: Tensor) -> Tensor:
        return square(sizes(self.g) * sizes(self.x)).flatten(1).sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g, x = weighted_pair(self.g, self.x, weights)
        # (h, (b t), o), (h, (b t), i): where that takes a copy, it goes by rows of o
        g, x = (v.permute(2, 0, 1, 3).flatten(1, 2) for v in (g, x))
        return torch.bmm(g.mT, x).reshape(self.shape).to(self.dtype)

    def sum_squares(self) -> Tensor:
        if self.g.shape[1] != 1:
            return super().sum_squares()
        own = self.balanced()
        g, x = square(accumulable(own.g[:, 0])), square(accumulable(own.x[:, 0]))
        return torch.einsum("bho,bhi->hoi", g, x).reshape(self.shape)

    def dot(self, v: Tensor) -> Tensor:
        h, o = self.g.shape[2:]
        v = accumulable(v).conj().reshape(h, o, self.x.shape[3])
        mapped = torch.einsum("bthi,hoi->btho", accumulable(self.x), v)
        return real(mapped * accumulable(self.g)).flatten(1).sum(1)

    def _inner(self, other: Factor) -> Tensor | None:
        return self._of_pairs(other) if self._has_heads_of(other) and self._gram_pays(other) else None

    def _of_pairs(self, other: Outer) -> Tensor:
        """(b,): the inner products by those of all pairs of positions."""
        parts = []
        for s in self.slices(self.g.shape[1] * other.g.shape[1] * self.g.shape[2] * 8):
            gg = _positions(self.g[s], other.g[s])
            parts.append(real(gg * _positions(self.x[s], other.x[s])).flatten(1).sum(1))
        return gather(parts)

    def _has_heads_of(self, other: Factor) -> TypeGuard[Outer]:
        return isinstance(other, Outer) and other.g.shape[2:] == self.g.shape[2:]

    def _gram_pays(self, other: Outer) -> bool:
        o, i = self.g.shape[3], self.x.shape[3]
        return other.g.shape[1] * (i + o) < 2 * i * o

    def _gram(self, other: Factor) -> Tensor | None:
        if not self._has_heads_of(other):
            return None
        b, t, h, o = self.g.shape
        c, u, i = other.batch, other.g.shape[1], self.x.shape[3]
        # pairs of positions against pairs of rows, of which the other's are built once for each block of ours
        blocks = 1 + b * self.row_numel * self.dtype.itemsize // BLOCK_BYTES
        many = t * u * (i + o) > i * o * (1 + t / max(1, c) + blocks * u / max(1, b))
        if many or self.norm_cost().is_small or any(f._cancels() for f in dict.fromkeys((self, other))):
            return self._gram_by_rows(other)
        lines = []
        for s in self.slices(t * h * c * u * 8):
            gg = torch.einsum("btho,cuho->bchtu", accumulable(self.g[s]), accumulable(other.g).conj())
            xx = torch.einsum("bthi,cuhi->bchtu", accumulable(self.x[s]), accumulable(other.x).conj())
            lines.append(real(gg * xx).flatten(2).sum(2))
        return gather(lines)

    def _cancels(self) -> bool:
        """Whether inner products between positions may be rounding."""
        if self.g.shape[1] == 1 or not may_ask(self.g):
            return False
        sq = self._of_pairs(self)
        return answers([cancels(sq, self.squares_of_parts(sq))])[0]


def _products_of_norms(g: Tensor, x: Tensor) -> Tensor:
    """(b, t, h): |g|^2 |x|^2. The range of float64, where there is one, makes balancing needless, and is quicker."""
    own = accumulable(g[:0]).dtype
    if in_range(g[:0]).dtype == own:
        g, x = balance(g, x)
    products = square(in_range(g)).sum(-1) * square(in_range(x)).sum(-1)
    return products.to(own.to_real())


def _positions(a: Tensor, b: Tensor) -> Tensor:
    """(b, h, t, u): the inner products of all positions of a (b, t, h, f) with all of b (b, u, h, f)."""
    return torch.matmul(accumulable(a).movedim(1, 2), accumulable(b).conj().movedim(1, 2).mT)
