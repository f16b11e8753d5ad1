"""The numbers of a parameter in another shape, or in another order."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...factors import Broadcast, Factor, Lines, Multiple, Outer
from ..registry import register_pullback

aten = torch.ops.aten


@register_pullback(
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.flatten.using_ints,
    aten.squeeze.default, aten.squeeze.dim,
)  # fmt: skip
def _reshaped(factor: Factor, *, shape: torch.Size) -> Factor | None:
    if isinstance(factor, Broadcast | Outer):
        return replace(factor, shape=tuple(shape))
    if isinstance(factor, Multiple):
        inner = _reshaped(factor.factor, shape=shape)
        return None if inner is None else Multiple(inner, factor.m.reshape(shape))
    if isinstance(factor, Lines) and (
        factor.dim is None or (factor.dim == 0 and shape[:1] == factor.shape[:1])
    ):
        return replace(factor, m=factor.m.reshape(shape))
    return None


@register_pullback(aten.permute.default)
def _permuted(factor: Factor, *, dims: list[int], shape: torch.Size) -> Factor | None:
    back = [[d % len(shape) for d in dims].index(d) for d in range(len(shape))]
    if not back:
        return factor
    if isinstance(factor, Broadcast):
        whole, order = factor.shape, [2 + d for d in back]
        moved = factor.mapped(lambda v: v.unflatten(2, whole).permute(0, 1, *order).flatten(2))
        return replace(moved, shape=tuple(shape))
    if isinstance(factor, Multiple):
        inner = _permuted(factor.factor, dims=dims, shape=shape)
        return None if inner is None else Multiple(inner, factor.m.permute(back))
    if isinstance(factor, Lines):
        dim = None if factor.dim is None else back.index(factor.dim)
        return replace(factor, m=factor.m.permute(back), dim=dim)
    if not isinstance(factor, Outer) or not factor.is_of_matrices or back not in ([1, 0], [0, 2, 1]):
        return None
    return replace(factor, g=factor.x, x=factor.g, shape=tuple(shape))


@register_pullback(aten.transpose.int)
def _transposed(factor: Factor, *, dim0: int, dim1: int, shape: torch.Size) -> Factor | None:
    dims = list(range(len(shape)))
    if dims:  # a number has nothing to turn
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permuted(factor, dims=dims, shape=shape)


@register_pullback(aten.t.default, aten.numpy_T.default)
def _turned(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return _permuted(factor, dims=[*range(len(shape))][::-1], shape=shape)


@register_pullback(aten.mT.default)
def _turned_matrices(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return _transposed(factor, dim0=-1, dim1=-2, shape=shape)
