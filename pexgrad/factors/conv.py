"""The convolution factor, for 1, 2 and 3 spatial dimensions at once.

A convolution with kernel h (D, C/G, K), padding P, stride S and dilation E,

    y[b, d, s'] = sum over c, k of h[d, c, k] x[b, c, S s' + E k - P],

has the per-example weight gradient (Rochette et al., arXiv 1912.06015, section 3.2)

    G[b, d, c, k] = sum over s' of g[b, d, s'] x[b, c, S s' + E k - P]:

a convolution of x with g over s', in which stride and dilation have changed places. Where several
positions t of one example were folded into the batch, the rows of the positions add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from ..errors import InputError
from ._base import Factor, dots, into
from .outer import Outer

CONV = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution over n spatial dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


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
        name = self.algorithm()
        if name == "unfold":
            return self.unfolded().rows(out)
        if name == "loop" and out is not None:
            for row, x, g in zip(out, self.x, self.g, strict=True):
                row.copy_(weight_gradient(x, g, self))
            return out
        return into(out, ALGORITHMS[name](self).reshape(self.batch, *self.shape).to(self.dtype))

    def algorithm(self) -> str:
        return choose(self) if self.rule == "auto" else self.rule

    def keeps_rows(self) -> bool:
        return (
            self.norm_algorithm() != "gram"
        )  # rows cost as much as the weighted sum, which they then give for free

    def norm_algorithm(self) -> str:
        d, c = self.shape[0] // self.geometry.groups, prod(self.shape[1:])
        t = self.g[0, :, 0].numel()
        return "gram" if 2 * t * (c + d) < c * d else "rows in pieces"

    def sq_norms(self) -> Tensor:
        return self.unfolded().sq_norms() if self.norm_algorithm() == "gram" else super().sq_norms()

    def inner(self, other: Factor) -> Tensor:
        same = isinstance(other, Conv) and self.norm_algorithm() == other.norm_algorithm() == "gram"
        return self.unfolded().inner(other.unfolded()) if same else super().inner(other)  # pyright: ignore[reportAttributeAccessIssue]

    def gram(self, other: Factor) -> Tensor:
        return self.unfolded().gram(other.unfolded()) if isinstance(other, Conv) else super().gram(other)

    def dot(self, v: Tensor) -> Tensor:
        return dots(self._forward(v).reshape(self.g.shape), self.g.conj())

    def _forward(self, v: Tensor) -> Tensor:
        geometry = self.geometry
        return CONV[len(geometry.kernel) - 1](
            self.x.flatten(0, 1), v.to(self.x.dtype), None, geometry.stride, geometry.padding, geometry.dilation,
            geometry.groups,
        )  # fmt: skip

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = self.g * weights.reshape(-1, *[1] * (self.g.dim() - 1)).to(self.g.dtype)
        return weight_gradient(self.x.flatten(0, 1), g.flatten(0, 1), self).to(self.dtype)

    def unfolded(self) -> Outer:
        """The same gradient as an outer factor: x cut into its windows, (b, (t s'), groups, (c k))."""
        n, groups = len(self.geometry.kernel), self.geometry.groups
        flat = unfold(self.x, self.geometry).flatten(3 + n).flatten(3, 2 + n)  # (b, t, c, s', k)
        x = rearrange(flat, "b t (h c) s k -> b (t s) h (c k)", h=groups)
        g = rearrange(self.g.flatten(3), "b t (h d) s -> b (t s) h d", h=groups)
        return Outer(g, x, self.shape, self.dtype)


def unfold(x: Tensor, geometry: Geometry) -> Tensor:
    """(b, t, c, *s', *kernel): the windows of x (b, t, c, *s), a view of the padded x."""
    x = pad(x, geometry.padding)
    for i, (k, s, e) in enumerate(zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)):
        x = x.unfold(3 + i, e * (k - 1) + 1, s)[..., ::e]
    return x


def pad(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Zero-pad the last dimensions of x on both sides."""
    return F.pad(x, [p for n in reversed(padding) for p in (n, n)]) if any(padding) else x


def weight_gradient(x: Tensor, g: Tensor, factor: Conv) -> Tensor:
    """The library's own weight gradient, summed over the batch: x (n, c, *s), g (n, d, *s')."""
    geometry = factor.geometry
    n = len(geometry.kernel)
    weight = x.new_empty(factor.shape)
    return torch.ops.aten.convolution_backward(
        g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, [0] * n, geometry.groups,
        (False, True, False),
    )[1]  # fmt: skip


# --- algorithms for the rows: (b, d, c/groups, *kernel) each ----------------------------------------


def grouped(factor: Conv) -> Tensor:
    """The paper's grouped convolution (arXiv 1912.06015, section 3.2, algorithm 2).

    All examples become groups of one convolution with one more spatial dimension, over the input channels
    of a group: x as (1, B*G, C/G, *S), g as a kernel (B*D, 1, 1, *S'), padding (0, P), stride (1, E), dilation (1, S).
    Its output (1, B*D, C/G, *K') is cut to the kernel's size. There is no four-dimensional convolution, so
    with three spatial dimensions the channels are the batch instead.
    """
    geometry, n = factor.geometry, len(factor.geometry.kernel)
    b, groups = factor.batch * factor.g.shape[1], geometry.groups
    x, g = factor.x.flatten(0, 1), factor.g.flatten(0, 1)
    if n < 3:
        out = CONV[n](
            rearrange(x, "b (h c) ... -> 1 (b h) c ...", h=groups),
            rearrange(g, "b d ... -> (b d) 1 1 ..."),
            padding=(0, *geometry.padding),
            stride=(1, *geometry.dilation),
            dilation=(1, *geometry.stride),
            groups=b * groups,
        )
        out = _cut(out, geometry.kernel)
        out = rearrange(out, "1 (b d) c ... -> b d c ...", b=b)
    else:
        out = channels_as_batch(x, g, geometry)
    return _sum_positions(out, factor)


def channels_as_batch(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The same convolution one dimension lower: x as (C/G, B*G, *S), g as a kernel (B*D, 1, *S')."""
    n, groups = len(geometry.kernel), geometry.groups
    out = CONV[n - 1](
        rearrange(x, "b (h c) ... -> c (b h) ...", h=groups),
        rearrange(g, "b d ... -> (b d) 1 ..."),
        padding=geometry.padding,
        stride=geometry.dilation,
        dilation=geometry.stride,
        groups=x.shape[0] * groups,
    )
    return rearrange(_cut(out, geometry.kernel), "c (b d) ... -> b d c ...", b=x.shape[0])


def _cut(out: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Keep the first K of each spatial dimension: a stride that does not divide leaves more."""
    for i, k in enumerate(kernel):
        out = out.narrow(out.dim() - len(kernel) + i, 0, k)
    return out


def _sum_positions(out: Tensor, factor: Conv) -> Tensor:
    return out if factor.g.shape[1] == 1 else reduce(out, "(b t) ... -> b ...", "sum", b=factor.batch)


def lower(factor: Conv) -> Tensor:
    """The grouped convolution one dimension lower, whatever the number of dimensions."""
    return _sum_positions(
        channels_as_batch(factor.x.flatten(0, 1), factor.g.flatten(0, 1), factor.geometry), factor
    )


def unfolded(factor: Conv) -> Tensor:
    """Windows of x times g, one batched matrix product."""
    return factor.unfolded().rows()


def loop(factor: Conv) -> Tensor:
    """The library's own weight gradient, one example at a time."""
    return torch.stack([weight_gradient(x, g, factor) for x, g in zip(factor.x, factor.g, strict=True)])


ALGORITHMS: dict[str, Callable[[Conv], Tensor]] = {
    "grouped": grouped,
    "lower": lower,
    "unfold": unfolded,
    "loop": loop,
}
CONV_RULES = ("auto", "grouped", "unfold", "loop")


def choose(factor: Conv) -> str:
    """The algorithm for these shapes."""
    spatial = factor.g[0, 0, 0].numel()
    if all(k == 1 for k in factor.geometry.kernel):
        return "unfold"
    if factor.geometry.groups == factor.x.shape[2]:
        return "lower" if factor.g.shape[1] == 1 else "unfold"
    return "loop" if spatial >= 400 else "unfold"


def check_conv_rule(rule: str) -> None:
    """Raise where the option names no algorithm."""
    if rule not in CONV_RULES:
        raise InputError(f"conv_rule={rule!r} is not one of {', '.join(map(repr, CONV_RULES))}")
