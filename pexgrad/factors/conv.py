"""The convolution factor, for 1, 2 and 3 spatial dimensions at once: see `convolving.py` for the algebra.

Where several positions t of one example were folded into the batch, the rows of the positions add.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..base.fakes import is_recorded
from ..base.numerics import (
    accumulable,
    channels_last,
    dots,
    gather,
    into,
    may_write,
    multiple,
    square,
    weighted_pair,
)
from . import choice
from ._base import BLOCK_BYTES, PIECE_BYTES, Factor
from .balance import balance
from .convolving import Geometry, convolve, grouped, joint, lower, unfold, weight_gradient, window_gram
from .norm_cost import GRAM, NormCost, of_convolution
from .outer import Outer

_AT_ONCE = {"grouped": grouped, "lower": lower, "joint": joint}


@dataclass(frozen=True, eq=False)
class Conv(Factor):
    """The weight of a convolution."""

    x: Tensor  # (b, t, c, *s)
    g: Tensor  # (b, t, d, *s')
    geometry: Geometry
    shape: tuple[int, ...]  # (d, c/groups, *kernel)
    dtype: torch.dtype
    rule: str = "auto"

    tensors = "g", "x"

    def rows(self, out: Tensor | None = None) -> Tensor:
        return self._rows_by(self._algorithm(into_memory=out is not None and out.nbytes > PIECE_BYTES), out)

    def _rows_by(self, algorithm: str, out: Tensor | None) -> Tensor:
        if algorithm == "unfold":
            return self._by_windows(out)
        if algorithm == "loop":
            return self._one_by_one(out)
        rows = _AT_ONCE[algorithm](self.x.flatten(0, 1), self.g.flatten(0, 1), self.geometry)
        if self.g.shape[1] != 1:
            rows = rows.unflatten(0, self.g.shape[:2]).sum(1)
        return into(out, rows.to(self.dtype))

    def _one_by_one(self, out: Tensor | None) -> Tensor:
        """The library's own weight gradient, one example at a time."""
        rows = (weight_gradient(x, g, self.geometry, self.shape) for x, g in zip(self.x, self.g, strict=True))
        if self.batch and not may_write(self.g, self.x):  # of no examples there is nothing to stack
            return into(out, torch.stack(list(rows)).to(self.dtype))
        out = self._empty() if out is None else out
        for own, row in zip(out, rows, strict=True):
            own.copy_(row)
        return out

    def _by_windows(self, out: Tensor | None) -> Tensor:
        """Windows of x times g, batched matrix products; a few examples at a time, so that the windows stay in cache."""
        pieces = self.slices(self._unfolded_bytes())
        if not may_write(self.g, self.x):
            return into(out, gather([self.take(s).unfolded().rows() for s in pieces]))
        out = self._empty() if out is None else out
        for s in pieces:
            self.take(s).unfolded().rows(out[s])
        return out

    def _empty(self) -> Tensor:
        return self.g.new_empty(self.batch, *self.shape, dtype=self.dtype)

    def scaled(self, m: Tensor) -> Conv | None:
        if m.dim() != len(self.shape) or m.numel() != m.shape[0]:
            return None
        wide = self.mapped(accumulable)
        return replace(wide, g=multiple(wide.g, m.reshape(-1, *[1] * (wide.g.dim() - 3))))

    def dots_along(self, m: Tensor, dim: int) -> Tensor | None:
        if dim != 0 or self.norm_cost().way != GRAM:  # else its rows cost less
            return None
        x = accumulable(self.x.flatten(0, 1))
        if not m.stride(1):  # the same for all channels, which may be added up before
            x, m = x.unflatten(1, (self.geometry.groups, -1)).sum(2), m[:, :1]
        y = convolve(x, m.to(x.dtype), self.geometry)
        return (accumulable(y.reshape(self.g.shape)) * accumulable(self.g)).flatten(3).sum((1, 3))

    def algorithm(self) -> str:
        return self._algorithm(into_memory=False)

    def _algorithm(self, into_memory: bool) -> str:
        if self.rule not in ("auto", "measure"):
            return self.rule
        if self.rule == "auto" and choice.prices(self.g.device.type):
            return choice.by_model(self.work(), self.g.device.type, into_memory)
        if is_recorded(self.g):  # where nothing can be measured
            return choice.remembered(self.work(), self.g, into_memory) or "unfold"
        return choice.by_measurement(self.work(), self.g, into_memory, lambda name: self._rows_by(name, None))

    def work(self) -> choice.Work:
        """What the choice of an algorithm depends on."""
        groups = self.geometry.groups
        return choice.Work(
            examples=self.batch, fold=self.g.shape[1], outputs=self.g.shape[2] // groups, inputs=self.shape[1], groups=groups,
            kernel=prod(self.geometry.kernel), positions=prod(self.g.shape[3:]), pixels=prod(self.x.shape[3:]),
        )  # fmt: skip

    def balanced(self) -> Conv:
        groups = (self.geometry.groups, -1)
        g, x = balance(self.g.unflatten(2, groups), self.x.unflatten(2, groups))
        return replace(self, g=g.flatten(2, 3), x=x.flatten(2, 3))

    def norm_cost(self) -> NormCost:
        groups = self.geometry.groups
        return of_convolution(
            self.g[0:1, :, 0].numel(), self.x[0:1, :, 0].numel(), self.shape[0] // groups, self.shape[1],
            self.geometry.kernel, self.batch * self.row_numel,
        )  # fmt: skip

    def squares_of_parts(self, sq: Tensor) -> Tensor:
        if not self.sums_products:  # nor do its products with others
            return sq
        groups, kernel = self.geometry.groups, self.geometry.kernel
        g, x = (
            square(accumulable(v)).flatten(0, 1).unflatten(1, (groups, -1)).sum(2) for v in (self.g, self.x)
        )
        windows = convolve(x, x.new_ones(groups, 1, *kernel), self.geometry)
        return (g * windows).unflatten(0, self.g.shape[:2]).flatten(1).sum(1)

    def _inner(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Conv) or other.geometry != self.geometry:
            return None
        if {self.norm_cost().way, other.norm_cost().way} != {GRAM}:
            return None
        pairs = self.geometry.groups * self.x[0:1, :, 0].numel() * other.x[0:1, :, 0].numel()
        return gather([self.take(s)._by_windows_of(other.take(s)) for s in self.slices(pairs * 8)])

    def _by_windows_of(self, other: Conv) -> Tensor:
        g, h = (accumulable(f._grouped_cotangents()).movedim(2, 1) for f in (self, other))
        x, y = (accumulable(f.x) for f in (self, other))
        return dots(torch.matmul(g, h.conj().mT), window_gram(x, y, self.geometry).conj())

    def _grouped_cotangents(self) -> Tensor:
        """(b, (t s'), groups, d)."""
        return channels_last(self.g).unflatten(2, (self.geometry.groups, -1))

    def _gram(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Conv):
            return None
        lines = []
        for s in self.slices(self._unfolded_bytes(), BLOCK_BYTES):
            mine = self.take(s).unfolded()
            theirs = other.slices(other._unfolded_bytes(), BLOCK_BYTES)
            lines.append(torch.cat([mine.gram(other.take(u).unfolded()) for u in theirs], 1))
        return gather(lines)

    def _unfolded_bytes(self) -> int:
        """Of one example of `unfolded().x`."""
        positions = self.g[0:1, :, 0].numel()
        return positions * self.geometry.groups * prod(self.shape[1:]) * self.x.dtype.itemsize

    def dot(self, v: Tensor) -> Tensor:
        x = accumulable(self.x.flatten(0, 1))
        y = convolve(x, v.conj().to(x.dtype), self.geometry)
        return dots(y.reshape(self.g.shape), self.g.conj())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        # the library's kernel is made for more positions than channels
        if not is_recorded(self.g) and 4 * self.g[:, :, 0].numel() <= self.shape[0]:
            return self.unfolded().weighted_sum(weights)
        g, x = weighted_pair(self.g, self.x, weights)
        return weight_gradient(x.flatten(0, 1), g.flatten(0, 1), self.geometry, self.shape).to(self.dtype)

    def unfolded(self) -> Outer:
        """The same gradient as an outer factor: x cut into its windows, (b, (t s'), groups, (c k))."""
        n, groups = len(self.geometry.kernel), self.geometry.groups
        windows = unfold(self.x, self.geometry)  # (b, t, c, *s', *k)
        # positions innermost in memory, in one copy: it then goes by runs, not element by element
        inner = windows.permute(0, 2, *range(3 + n, 3 + 2 * n), 1, *range(3, 3 + n))
        x = inner.reshape(self.batch, groups, prod(self.shape[1:]), -1)  # (b, h, (c k), (t s'))
        return Outer(self._grouped_cotangents(), x.movedim(3, 1), self.shape, self.dtype)
