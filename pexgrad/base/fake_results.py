"""The fake result of an operation whose shape is plain to see, where torch's own functions take hundreds of steps to it.

Without this a trace takes half as long again, or twice. A question about the batch size that is asked here counts as the
model's own, for its graph depends on the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

from . import shapes
from .symbols import are_same

aten = torch.ops.aten


def plain_result(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """What the operation gives for these arguments; None where torch has to tell."""
    if func is aten.clone.default and kwargs == {"memory_format": torch.contiguous_format}:
        return shapes.new_like(args[0], args[0].shape) if isinstance(args[0], FakeTensor) else None
    return _RESULTS[func](*args) if func in _RESULTS and not kwargs else None


def _linear(_: Any, x: Tensor, w: Tensor) -> Tensor | None:
    fits = type(x.shape[1]) is int and x.shape[1] == w.shape[0]
    return shapes.new_like(x, (x.shape[0], w.shape[1])) if fits and isinstance(x, FakeTensor) else None


def _like_its_input(x: Tensor, *_: Any) -> Tensor | None:
    """A function of each number, whose result has the same shape and strides, and dtype where that is floating."""
    return shapes.new_like(x, x.shape) if shapes.is_plain(x) and x.is_floating_point() else None


def _between(x: Tensor, y: Any) -> Tensor | None:
    """Two tensors of one shape and dtype, or one and a number."""
    if not isinstance(x, FakeTensor):  # a number has come first
        return None
    equal = type(y) in (int, float) or (
        shapes.is_plain(y) and (y.dtype, y.device) == (x.dtype, x.device) and are_same(y.shape, x.shape)
    )
    return _like_its_input(x) if equal else None


def _viewed(x: Tensor, shape: Sequence[Any]) -> Tensor | None:
    if not shapes.is_plain(x) or any(type(n) is int and n < 0 for n in shape):
        return None
    fits = x.numel() == math.prod(shape)
    torch._check(fits, lambda: f"shape {list(shape)} is invalid for input of size {x.numel()}")
    return shapes.seen_as(x, shape)


def _padded(x: Tensor, padding: Sequence[int], *_: Any) -> Tensor | None:
    """In a flat graph, torch's own way fixes the batch size."""
    if not isinstance(x, FakeTensor):
        return None
    pairs = list(zip(padding[::2], padding[1::2], strict=True))  # (before, after), the last dimension first
    grown = [n + sum(pairs[i]) if i < len(pairs) else n for i, n in enumerate(reversed(x.shape))]
    return x.new_empty(grown[::-1]).contiguous(memory_format=suggest_memory_format(x))


def _in_groups(
    x: Tensor, _weight: Any, _bias: Any, n: Any, _c: Any, _positions: Any, groups: int, *_: Any
) -> Any:
    return _normalised(x, (n, groups))


def _in_lines(x: Tensor, line: Sequence[int], *_: Any) -> Any:
    along = len(line)
    return _normalised(x, (*x.shape[: x.dim() - along], *[1] * along))


def _by_running_statistics(x: Tensor, *_: Any) -> Any:
    return _normalised(x, (0,))


def _normalised(x: Tensor, each: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """The result, and the mean and 1 / std of each group of positions, which are in float32 where x is in a half precision."""
    if not shapes.is_plain(x) or x.dtype not in (torch.float32, torch.float64):
        return None
    return shapes.new_like(x, x.shape), shapes.new_like(x, each), shapes.new_like(x, each)


_RESULTS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _linear,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _viewed),
    aten.constant_pad_nd.default: _padded,
    aten.native_group_norm.default: _in_groups,
    aten.native_layer_norm.default: _in_lines,
    aten._native_batch_norm_legit_no_training.default: _by_running_statistics,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), _between),
    **{
        op.default: _like_its_input
        for op in (
            aten.abs, aten.clamp, aten.clone, aten.cos, aten.exp, aten.gelu, aten.relu, aten.roll, aten.sigmoid, aten.silu,
            aten.sin, aten.sqrt, aten.tanh,
        )
    },
}  # fmt: skip
