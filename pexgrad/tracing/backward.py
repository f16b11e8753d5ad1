"""What a loss and autograd add to a graph, in forms that run on batches of any size and under `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .squeezes import SQUEEZES

aten = torch.ops.aten


def batch_norm_backward(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, _: Any, __: Any, train: bool, eps: float,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """In eval y = w (x - m) / s + c; torch's kernel on a CPU divides by the number of elements, which may be zero."""
    if train:
        return NotImplemented
    channels = [1, -1] + [1] * (x.dim() - 2)
    others = [d for d in range(x.dim()) if d != 1]
    scale = (var + eps).rsqrt()
    of_x = g * (scale if weight is None else scale * weight).reshape(channels)
    of_weight = (g * (x - mean.reshape(channels))).sum(others) * scale
    parts = of_x.to(x.dtype), of_weight, g.sum(others)
    return tuple(part if w else None for part, w in zip(parts, wanted, strict=True))


def group_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: Any, c: Any, size: Any, group: int,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Without the scale, in one precision."""
    scale = None if weight is None else weight.reshape(1, -1, *[1] * (g.dim() - 2))

    def plain(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        return aten.native_group_norm_backward(g, x, mean, rstd, None, n, c, size, group, wanted)

    return _in_one_precision(plain, g, x, mean, rstd, scale, wanted)


def layer_norm_backward(
    g: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """The same for layer norm."""

    def plain(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        return aten.native_layer_norm_backward(g, x, shape, mean, rstd, None, None, wanted)

    return _in_one_precision(plain, g, x, mean, rstd, weight, wanted)


def _in_one_precision(
    plain: Callable[..., Any], g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor | None,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Under autocast the scale is in another precision than what it scales, which vmap's rule does not take."""
    if scale is None or scale.dtype == x.dtype or any(wanted[1:]):
        return NotImplemented
    of_x, *others = plain(g.to(scale.dtype) * scale, *(t.to(scale.dtype) for t in (x, mean, rstd)))
    return of_x.to(x.dtype), *others


BACKWARD = {
    **SQUEEZES,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.native_layer_norm_backward.default: layer_norm_backward,
}
