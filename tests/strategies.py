"""Hypothesis strategies for the configurations of layers, each of which prints as what it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from hypothesis import strategies as st

from pexgrad.testing import conv_configs as conv_configs
from pexgrad.testing import linear_configs as linear_configs

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def small(largest):
    return st.integers(1, largest)


@dataclass(frozen=True)
class TransposedConfig:
    """A transposed convolution and the size of its input."""

    batch: int
    channels: tuple[int, int]
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool

    def build(self):
        torch.manual_seed(0)
        layer = TRANSPOSED[len(self.size) - 1](
            *self.channels,
            self.kernel,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.bias,
            self.dilation,
        )
        return layer, torch.randn(self.batch, self.channels[0], *self.size)


@st.composite
def transposed_configs(draw):
    """Any transposed convolution whose output is not empty."""
    n = draw(st.sampled_from([1, 2, 3]))

    def each(elements):
        return tuple(draw(elements) for _ in range(n))

    kernel, dilation, stride = each(small(3 if n < 3 else 2)), each(small(2)), each(small(3))
    output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    padding = tuple(draw(st.integers(0, d * (k - 1) // 2)) for d, k in zip(dilation, kernel, strict=True))
    groups = draw(st.sampled_from([1, 2]))
    channels = groups * draw(small(2)), groups * draw(small(2))
    return TransposedConfig(
        draw(small(4)),
        channels,
        each(st.integers(1, 4)),
        kernel,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        draw(st.booleans()),
    )
