"""Tensors that code holds beside parameters and buffers, as they were at one moment."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Place = int  # of a tensor: how many marks a walk had left before it
_FEW = 64  # numbers of a tensor that are looked at


class Held(NamedTuple):
    """A tensor as it was; where that matters, also how often it had been changed in place, and what was in it.

    The numbers are kept of small tensors only. They show changes that torch does not count: those by way of `.data`, or through
    an array of NumPy's on the same memory.
    """

    tensor: Tensor
    outline: Any
    version: int | None = None
    numbers: bytes | None = None

    def is_same(self, numbers: bool) -> bool:
        """Whether it has not been changed since, its numbers included or not."""
        if self.outline != outline(self.tensor):
            return False
        same = self.version in (None, _version(self.tensor)) and self.numbers in (None, _numbers(self.tensor))
        return same or not numbers


def as_it_is(t: Tensor) -> Held:
    """A tensor with all that is known of it now."""
    return Held(t, outline(t), _version(t), _numbers(t))


def _numbers(t: Tensor) -> bytes | None:
    """The bytes of a small tensor in a CPU's memory."""
    plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and t.device.type == "cpu"
    if not plain or t.numel() > _FEW:
        return None
    return bytes(t.detach().reshape(-1).contiguous().view(torch.uint8).tolist())


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def outline(t: Tensor) -> Any:
    """What code may ask of a tensor beside its numbers."""
    if t._has_symbolic_sizes_strides:  # a loss has kept it that is being written down
        return type(t)
    strides = t.stride() if t.layout is torch.strided else None
    return type(t), t.shape, t.dtype, t.device, t.layout, strides, t.requires_grad
