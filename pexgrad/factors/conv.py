"""The convolution factor, for 1, 2 and 3 spatial dimensions at once: see `convolving.py` for the algebra.

Where several positions t of one example were folded into the batch, the rows of the positions add.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from einops import rearrange, reduce
from torch import Tensor

from ..errors import InputError
from . import choice
from ._base import BLOCK_BYTES, Factor, dots, gather, into, is_recorded, weighted_pair
from .convolving import Geometry, convolve, grouped, lower, unfold, weight_gradient
from .outer import Outer

CONV_RULES = ("auto", "measure", "grouped", "unfold", "loop")


def check_conv_rule(rule: str) -> None:
    """Raise where the option names no algorithm."""
    if rule not in CONV_RULES:
        raise InputError(f"conv_rule={rule!r} is not one of {', '.join(map(repr, CONV_RULES))}")


@dataclass(frozen=True, eq=False)
class Conv(Factor):
    """The weight of a convolution."""

    x: Tensor  # (b, t, c, *s)
    g: Tensor  # (b, t, d, *s')
    geometry: Geometry
    shape: tuple[int, ...]  # (d, c/groups, *kernel)
    dtype: torch.dtype
    rule: str = "auto"

    @property
    def batch(self) -> int:
        return self.g.shape[0]

    def narrow(self, start: int, length: int) -> Conv:
        return replace(self, x=self.x.narrow(0, start, length), g=self.g.narrow(0, start, length))

    def rows(self, out: Tensor | None = None) -> Tensor:
        return self._rows_by(self.algorithm(), out)

    def _rows_by(self, algorithm: str, out: Tensor | None) -> Tensor:
        if algorithm == "unfold":
            return self._by_windows(out)
        if algorithm == "loop":
            return self._one_by_one(out)
        by = grouped if algorithm == "grouped" else lower
        rows = by(self.x.flatten(0, 1), self.g.flatten(0, 1), self.geometry)
        if self.g.shape[1] != 1:
            rows = reduce(rows, "(b t) ... -> b ...", "sum", b=self.batch)
        return into(out, rows.to(self.dtype))

    def _one_by_one(self, out: Tensor | None) -> Tensor:
        """The library's own weight gradient, one example at a time."""
        rows = (weight_gradient(x, g, self.geometry, self.shape) for x, g in zip(self.x, self.g, strict=True))
        if out is None:
            return torch.stack(list(rows)).to(self.dtype) if self.batch else self._empty()
        for own, row in zip(out, rows, strict=True):
            own.copy_(row)
        return out

    def _by_windows(self, out: Tensor | None) -> Tensor:
        """Windows of x times g, batched matrix products; a few examples at a time, so that the windows stay in cache."""
        if is_recorded(self.g) or (
            torch.is_grad_enabled() and (self.g.requires_grad or self.x.requires_grad)
        ):
            return into(out, self.unfolded().rows())
        out = self._empty() if out is None else out
        for s in self.slices(self._unfolded_bytes()):
            self.take(s).unfolded().rows(out[s])
        return out

    def _empty(self) -> Tensor:
        return self.g.new_empty(self.batch, *self.shape, dtype=self.dtype)

    def algorithm(self) -> str:
        if self.rule not in ("auto", "measure"):
            return self.rule
        if self.rule == "auto" and choice.prices(self.g.device.type):
            return choice.by_model(self.work(), self.g.device.type)
        if is_recorded(self.g):
            return "unfold"
        return choice.by_measurement(self.work(), self.g, lambda name: self._rows_by(name, None))

    def work(self) -> choice.Work:
        """What the choice of an algorithm depends on."""
        groups = self.geometry.groups
        return choice.Work(
            examples=self.batch, fold=self.g.shape[1], outputs=self.g.shape[2] // groups, inputs=self.shape[1], groups=groups,
            kernel=prod(self.geometry.kernel), positions=prod(self.g.shape[3:]), pixels=prod(self.x.shape[3:]),
        )  # fmt: skip

    def keeps_rows(self) -> bool:
        return (
            self.norm_algorithm() != "gram"
        )  # rows cost as much as the weighted sum, which they then give for free

    def norm_algorithm(self) -> str:
        d, c = self.shape[0] // self.geometry.groups, prod(self.shape[1:])
        t = self.g[0, :, 0].numel()
        return "gram" if 2 * t * (c + d) < c * d else "rows in pieces"

    def sq_norms(self) -> Tensor:
        if self.norm_algorithm() != "gram":
            return super().sq_norms()
        return gather([self.take(s).unfolded().sq_norms() for s in self.slices(self._unfolded_bytes())])

    def inner(self, other: Factor) -> Tensor:
        if not isinstance(other, Conv) or {self.norm_algorithm(), other.norm_algorithm()} != {"gram"}:
            return super().inner(other)
        pieces = self.slices(self._unfolded_bytes())
        return gather([self.take(s).unfolded().inner(other.take(s).unfolded()) for s in pieces])

    def gram(self, other: Factor) -> Tensor:
        if not isinstance(other, Conv):
            return super().gram(other)
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
        y = convolve(self.x.flatten(0, 1), v.conj().to(self.x.dtype), self.geometry)
        return dots(y.reshape(self.g.shape), self.g.conj())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g, x = weighted_pair(self.g, self.x, weights)
        return weight_gradient(x.flatten(0, 1), g.flatten(0, 1), self.geometry, self.shape).to(self.dtype)

    def unfolded(self) -> Outer:
        """The same gradient as an outer factor: x cut into its windows, (b, (t s'), groups, (c k))."""
        n, groups = len(self.geometry.kernel), self.geometry.groups
        windows = unfold(self.x, self.geometry)  # (b, t, c, *s', *k)
        # positions innermost in memory, in one copy: it then goes by runs, not element by element
        inner = windows.permute(0, 2, *range(3 + n, 3 + 2 * n), 1, *range(3, 3 + n))
        x = inner.reshape(self.batch, groups, prod(self.shape[1:]), -1)  # (b, h, (c k), (t s'))
        g = rearrange(self.g.flatten(3), "b t (h d) s -> b h d (t s)", h=groups)
        return Outer(g.movedim(3, 1), x.movedim(3, 1), self.shape, self.dtype)
