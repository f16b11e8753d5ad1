"""What a convolution's weight gradient is computed with: windows, the library's own kernel, the paper's convolution.

A convolution with kernel h (D, C/G, K), padding P, stride S and dilation E,

    y[b, d, s'] = sum over c, k of h[d, c, k] x[b, c, S s' + E k - P],

has the per-example weight gradient (Rochette et al., arXiv 1912.06015, section 3.2)

    G[b, d, c, k] = sum over s' of g[b, d, s'] x[b, c, S s' + E k - P]:

a convolution of x with g over s', in which stride and dilation have changed places. Everything here works
for 1, 2 and 3 spatial dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..base.numerics import channels_last, total

CONV = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution over n spatial dimensions."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def unfold(x: Tensor, geometry: Geometry) -> Tensor:
    """(b, t, c, *s', *kernel): the windows of x (b, t, c, *s), a view of the padded x."""
    x = pad(x, geometry.padding)
    for i, (k, s, e) in enumerate(zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True)):
        x = x.unfold(3 + i, e * (k - 1) + 1, s)[..., ::e]
    return x


def window_gram(x: Tensor, y: Tensor, geometry: Geometry) -> Tensor:
    """(b, h, (t s'), (u u')): <window of x, window of y> for all windows of x (b, t, c, *s) and y (b, u, c, *s), by group h.

    They are sums of the inner products of pixels, which take fewer multiplications by the size of the kernel:

        sum over k of <x[S s' + E k - P], y[S u' + E k - P]>
    """
    n, groups = len(geometry.kernel), geometry.groups
    x_of_group, y_of_group = (channels_last(v).unflatten(2, (groups, -1)).movedim(2, 1) for v in (x, y))
    pixels = torch.matmul(x_of_group, y_of_group.conj().mT)
    sums = pixels.reshape(*pixels.shape[:2], x.shape[1], *x.shape[3:], y.shape[1], *y.shape[3:])
    padding = [p for size in reversed(geometry.padding) for p in (size, size)]
    sums = F.pad(sums, [*padding, 0, 0, *padding]) if any(padding) else sums
    for i in range(n):  # one dimension of the kernel after the other: the sum of its sizes, not their product
        sums = _diagonal_sums(sums, (3 + i, 4 + n + i), geometry, i)
    return sums.flatten(3 + n).flatten(2, 2 + n)


def _diagonal_sums(pairs: Tensor, dims: tuple[int, int], geometry: Geometry, i: int) -> Tensor:
    """sum over k of pairs[S s' + E k, S u' + E k] in two dimensions, with the settings of the kernel's dimension i."""
    kernel, stride, dilation = geometry.kernel[i], geometry.stride[i], geometry.dilation[i]

    def at(k: int) -> Tensor:
        index = [slice(None)] * pairs.dim()
        for d in dims:
            index[d] = slice(dilation * k, pairs.shape[d] - dilation * (kernel - 1 - k), stride)
        return pairs[tuple(index)]

    return total(at(k) for k in range(kernel))


def pad(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Zero-pad the last dimensions of x on both sides."""
    return F.pad(x, [p for n in reversed(padding) for p in (n, n)]) if any(padding) else x


def convolve(x: Tensor, h: Tensor, geometry: Geometry) -> Tensor:
    """The convolution itself: x (n, c, *s), h (d, c/groups, *kernel)."""
    return CONV[len(geometry.kernel) - 1](
        x, h, None, geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    )


def weight_gradient(x: Tensor, g: Tensor, geometry: Geometry, shape: tuple[int, ...]) -> Tensor:
    """The library's own weight gradient, summed over the batch: x (n, c, *s), g (n, d, *s')."""
    if x.is_complex() and g.is_complex():  # the library has no such kernel for complex numbers
        (a, b), (c, d) = (torch.view_as_real(v.resolve_conj()).unbind(-1) for v in (x, g))
        w = lambda x, g: weight_gradient(x, g, geometry, shape)  # noqa: E731
        return torch.complex(w(a, c) - w(b, d), w(a, d) + w(b, c))
    x, geometry = _with_padding_in_memory(x, geometry)
    return torch.ops.aten.convolution_backward(
        g, x, x.new_empty(shape), None, geometry.stride, geometry.padding, geometry.dilation, False,
        [0] * len(geometry.kernel), geometry.groups, (False, True, False),
    )[1]  # fmt: skip


def _with_padding_in_memory(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """Padding beyond half the kernel as zeros in x: with more, oneDNN's weight gradient takes half as long again."""
    if x.device.type != "cpu":
        return x, geometry
    reach = zip(geometry.padding, geometry.kernel, geometry.dilation, strict=True)
    wide = tuple(max(0, p - e * (k - 1) // 2) for p, k, e in reach)
    left = tuple(p - w for p, w in zip(geometry.padding, wide, strict=True))
    return pad(x, wide), replace(geometry, padding=left)


# --- convolutions that give every example's gradient: x (b, c, *s), g (b, d, *s') -> (b, d, c/groups, *kernel) --------


def grouped(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The paper's grouped convolution (arXiv 1912.06015, section 3.2, algorithm 2).

    All examples become groups of one convolution with one more spatial dimension, over the input channels
    of a group: x as (1, B*G, C/G, *S), g as a kernel (B*D, 1, 1, *S'), padding (0, P), stride (1, E), dilation (1, S).
    Its output (1, B*D, C/G, *K') is cut to the kernel's size. There is no four-dimensional convolution, so
    with three spatial dimensions the channels are the batch instead.
    """
    n, groups = len(geometry.kernel), geometry.groups
    if n == 3:
        return lower(x, g, geometry)
    out = CONV[n](
        rearrange(x, "b (h c) ... -> 1 (b h) c ...", h=groups),
        rearrange(g, "b d ... -> (b d) 1 1 ..."),
        padding=(0, *geometry.padding),
        stride=(1, *geometry.dilation),
        dilation=(1, *geometry.stride),
        groups=x.shape[0] * groups,
    )
    return rearrange(_cut(out, geometry.kernel), "1 (b d) c ... -> b d c ...", b=x.shape[0])


def lower(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The same one dimension lower, with channels as the batch: x as (C/G, B*G, *S), g as a kernel (B*D, 1, *S')."""
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


def joint(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The library's own weight gradient, once: the examples as groups of one convolution, x (1, B*C, *S), g (1, B*D, *S')."""
    b, d, c = x.shape[0], g.shape[1], x.shape[1] // geometry.groups
    groups = replace(geometry, groups=b * geometry.groups)
    rows = weight_gradient(
        rearrange(x, "b c ... -> 1 (b c) ..."), rearrange(g, "b d ... -> 1 (b d) ..."), groups,
        (b * d, c, *geometry.kernel),
    )  # fmt: skip
    return rearrange(rows, "(b d) ... -> b d ...", b=b)


def _cut(out: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Keep the first K of each spatial dimension: a stride that does not divide leaves more."""
    for i, k in enumerate(kernel):
        out = out.narrow(out.dim() - len(kernel) + i, 0, k)
    return out
