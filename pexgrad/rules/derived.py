"""Pullbacks: from the factor of a value that is computed from parameters to the factors of what it is computed from.

    w = u v        G_u = G v^H,  G_v = u^H G        a sum over t of g[t] (x) x[t] stays one:
                   G_u = sum over t of g[t] (x) (x[t] v^H),  G_v = sum over t of (u^H g[t]) (x) x[t]

A low-rank update that is merged into its weight, w + u v, has no row of w's size this way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..base.numerics import accumulable
from ..factors import Broadcast, Factor, Lines, Outer, Rows, Scatter, along_lines, repeats_as_positions
from .registry import register_pullback

aten = torch.ops.aten


# --- sums and multiples -----------------------------------------------------------------------------


def _times(factor: Factor, by: Any, shape: torch.Size) -> Factor | None:
    """To what is multiplied by a number, by one for each line of a matrix, or elementwise; None where that is no factor."""
    if isinstance(factor, Broadcast):
        multiplied = factor if _is_one(by) else _elementwise(factor, by)
        return None if multiplied is None else _summed_to(multiplied, tuple(shape))
    if tuple(factor.shape) != tuple(shape) or not factor.tensors:
        return None
    if not isinstance(by, Tensor) or not by.dim():
        return factor if _is_one(by) else factor.times(_conjugate(by))
    if _is_of_matrices(factor) and len(shape) == 2 and tuple(by.shape) == (shape[0], 1):
        return replace(factor.mapped(accumulable), g=accumulable(factor.g) * _conjugate(by).flatten())
    return None


def _is_one(by: Any) -> bool:
    """Whether it changes nothing."""
    return not isinstance(by, Tensor) and by == 1


def _conjugate(by: Any) -> Any:
    return by.conj() if isinstance(by, Tensor) else by.conjugate()


def _elementwise(factor: Broadcast, by: Any) -> Broadcast | None:
    if not isinstance(by, Tensor) or not by.dim():
        return factor.times(_conjugate(by))
    if torch.broadcast_shapes(by.shape, factor.shape) != tuple(factor.shape):
        return None
    return factor.times(_conjugate(by).expand(factor.shape).flatten())


def _summed_to(factor: Broadcast, shape: tuple[int, ...]) -> Broadcast:
    """To an operand that is repeated along some dimensions of the result."""
    if tuple(factor.shape) == shape:
        return factor
    own = (1,) * (len(factor.shape) - len(shape)) + shape
    return replace(
        factor.mapped(lambda v: repeats_as_positions(v.unflatten(2, factor.shape), own)), shape=shape
    )


@register_pullback(
    aten.add.Tensor, aten.sub.Tensor, aten.alias.default, aten.clone.default, aten.contiguous.default
)
def _same(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return _times(factor, 1, shape)


@register_pullback(aten.add.Tensor, operand="other")
def _added(factor: Factor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    return _times(factor, alpha, shape)


@register_pullback(aten.rsub.Scalar)
@register_pullback(aten.sub.Tensor, operand="other")
def _subtracted(factor: Factor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    return _times(factor, -alpha, shape)


@register_pullback(aten.neg.default)
def _negated(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return _times(factor, -1, shape)


@register_pullback(aten.mul.Tensor)
def _multiplied(factor: Factor, other: Any, *, shape: torch.Size) -> Factor | None:
    return _along(factor, other, shape) or _times(factor, other, shape)


@register_pullback(aten.mul.Tensor, operand="other")
def _multiplied_by(factor: Factor, self: Any, *, shape: torch.Size) -> Factor | None:
    return _multiplied(factor, self, shape=shape)


@register_pullback(aten.div.Tensor)
def _divided(factor: Factor, other: Any, *, shape: torch.Size) -> Factor | None:
    return _times(factor, 1 / other, shape)


@register_pullback(aten.div.Tensor, operand="other")
def _divided_by(factor: Factor, self: Tensor, other: Tensor, *, shape: torch.Size) -> Factor | None:
    return _multiplied(factor, -accumulable(self) / accumulable(other) ** 2, shape=shape)


def _along(factor: Factor, m: Any, shape: torch.Size) -> Factor | None:
    """To what multiplies a matrix: a number, or one for each of its lines."""
    if not isinstance(m, Tensor) or m.is_complex() or tuple(m.shape) != tuple(factor.shape):
        return None
    if not len(shape):
        return Broadcast(factor.dot(m)[:, None, None], None, (), factor.dtype)
    if _is_of_matrices(factor) and tuple(shape) == (m.shape[0], 1):
        return Broadcast(along_lines(factor, m).unsqueeze(1), None, tuple(shape), factor.dtype)
    return None


@register_pullback(aten.norm_except_dim.default, operand="v")
def _norm_of_lines(factor: Factor, v: Tensor, *, pow: int, dim: int) -> Factor | None:
    if not isinstance(factor, Broadcast) or v.dim() != 2 or (pow, dim) != (2, 0) or v.is_complex():
        return None
    v = accumulable(v)
    return Lines(factor.summed(), v / torch.linalg.vector_norm(v, dim=1, keepdim=True), factor.dtype)


# --- the same numbers in another shape --------------------------------------------------------------


@register_pullback(
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.flatten.using_ints,
    aten.squeeze.default, aten.squeeze.dim,
)  # fmt: skip
def _reshaped(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return replace(factor, shape=tuple(shape)) if isinstance(factor, Broadcast | Outer) else None


@register_pullback(aten.permute.default)
def _permuted(factor: Factor, *, dims: list[int], shape: torch.Size) -> Factor | None:
    dims = [d % len(shape) for d in dims]
    if isinstance(factor, Broadcast):
        back = [2 + dims.index(d) for d in range(len(shape))]
        moved = factor.mapped(lambda v: v.unflatten(2, factor.shape).permute(0, 1, *back).flatten(2))
        return replace(moved, shape=tuple(shape))
    if not _is_of_matrices(factor) or dims not in ([1, 0], [0, 2, 1]):
        return None
    return replace(factor, g=factor.x, x=factor.g, shape=tuple(shape))


@register_pullback(aten.transpose.int)
def _transposed(factor: Factor, *, dim0: int, dim1: int, shape: torch.Size) -> Factor | None:
    dims = list(range(len(shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permuted(factor, dims=dims, shape=shape)


@register_pullback(aten.t.default, aten.numpy_T.default)
def _turned(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return _permuted(factor, dims=[*range(len(shape))][::-1], shape=shape)


@register_pullback(aten.mT.default)
def _turned_matrices(factor: Factor, *, shape: torch.Size) -> Factor | None:
    return _transposed(factor, dim0=-1, dim1=-2, shape=shape)


# --- products ---------------------------------------------------------------------------------------


def _is_of_matrices(factor: Factor) -> TypeGuard[Outer]:
    """Whether it is an outer factor with rows (o, i), or with (h, o, i) for its h heads."""
    if not isinstance(factor, Outer):
        return False
    own = (*factor.g.shape[2:], factor.x.shape[3])
    return tuple(factor.shape) == own or (own[0] == 1 and tuple(factor.shape) == own[1:])


def _takes(factor: Factor, shape: torch.Size, other: Tensor, inner: int) -> TypeGuard[Outer]:
    """Whether it goes through a product with `other`, over `inner` numbers, for less than its rows and their product cost."""
    if not _is_of_matrices(factor) or not shape[:-2] == other.shape[:-2] == tuple(factor.shape[:-2]):
        return False  # or one is repeated for each head
    t, o, i = factor.g.shape[1], factor.g.shape[3], factor.x.shape[3]
    return t * inner * (o + i) <= o * i * (t / 2 + inner)


def _first(factor: Factor, second: Tensor, shape: torch.Size) -> Factor | None:
    """To u (..., o, r) in u v."""
    if not _takes(factor, shape, second, second.shape[-2]):
        return None
    wide = factor.mapped(accumulable)
    return replace(wide, x=_times_matrix(wide.x, second.mT), shape=tuple(shape))


def _second(factor: Factor, first: Tensor, shape: torch.Size) -> Factor | None:
    """To v (..., r, i) in u v."""
    if not _takes(factor, shape, first, first.shape[-1]):
        return None
    wide = factor.mapped(accumulable)
    return replace(wide, g=_times_matrix(wide.g, first), shape=tuple(shape))


def _times_matrix(v: Tensor, m: Tensor) -> Tensor:
    """(b, t, h, r) from v (b, t, h, f) and a matrix (f, r), or one (h, f, r) for each head, conjugated."""
    return torch.einsum("bthf,hfr->bthr", v, m.to(v.dtype).conj().reshape(-1, *m.shape[-2:]))


@register_pullback(aten.mm.default, aten.bmm.default)
def _product_first(factor: Factor, mat2: Tensor, *, shape: torch.Size) -> Factor | None:
    return _first(factor, mat2, shape)


@register_pullback(aten.mm.default, aten.bmm.default, operand="mat2")
def _product_second(factor: Factor, self: Tensor, *, shape: torch.Size) -> Factor | None:
    return _second(factor, self, shape)


@register_pullback(aten.matmul.default)
def _matmul_first(factor: Factor, other: Tensor, *, shape: torch.Size) -> Factor | None:
    return _mapped(factor, other, shape) if other.dim() == 1 else _first(factor, other, shape)


@register_pullback(aten.matmul.default, operand="other")
def _matmul_second(factor: Factor, self: Tensor, *, shape: torch.Size) -> Factor | None:
    return _second(factor, self, shape)


@register_pullback(aten.addmm.default)
def _added_to(factor: Factor, *, beta: Any, shape: torch.Size) -> Factor | None:
    return _times(factor, beta, shape)


@register_pullback(aten.addmm.default, operand="mat1")
def _addmm_first(factor: Factor, mat2: Tensor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    first = _first(factor, mat2, shape)
    return None if first is None else _times(first, alpha, shape)


@register_pullback(aten.addmm.default, operand="mat2")
def _addmm_second(factor: Factor, mat1: Tensor, *, alpha: Any, shape: torch.Size) -> Factor | None:
    second = _second(factor, mat1, shape)
    return None if second is None else _times(second, alpha, shape)


def _mapped(factor: Factor, vec: Tensor, shape: torch.Size) -> Factor | None:
    """To the matrix in a matrix times a vector."""
    if not isinstance(factor, Broadcast) or len(shape) != 2 or vec.is_complex():
        return None
    g = factor.summed().to(vec.dtype)[:, None, None]  # (b, 1, 1, o)
    return Outer(g, vec.expand(g.shape[0], 1, 1, -1), tuple(shape), factor.dtype)


@register_pullback(aten.dot.default, aten.vdot.default, operand="other")
def _dotted(factor: Factor, self: Tensor, *, shape: torch.Size) -> Factor | None:
    if not isinstance(factor, Broadcast) or self.is_complex():
        return None
    return Broadcast(factor.summed()[:, None] * self, None, tuple(shape), factor.dtype)


@register_pullback(aten.dot.default, aten.vdot.default)
def _dotted_with(factor: Factor, other: Tensor, *, shape: torch.Size) -> Factor | None:
    return _dotted(factor, other, shape=shape)


# --- rows of a table --------------------------------------------------------------------------------


def _looked_up(factor: Factor, ids: Tensor, shape: torch.Size) -> Factor | None:
    """To a table (v, *rest) whose rows `ids` are taken, the same for every example."""
    if not isinstance(factor, Broadcast) or not ids.numel():
        return None
    table, ids = int(shape[0]), ids.flatten() % int(shape[0])  # negative ids count from the end
    g = factor.summed().unflatten(1, (ids.shape[0], -1))  # (b, t, f)
    if ids.shape[0] < table:
        return Scatter(g, ids.expand(g.shape[0], -1), tuple(shape), factor.dtype)
    rows = g.new_zeros(g.shape[0], table, g.shape[2]).index_add(
        1, ids, g
    )  # no larger than what they are made of
    return Rows(rows.reshape(g.shape[0], *shape).to(factor.dtype))


@register_pullback(aten.embedding.default, operand="weight")
def _embedded(
    factor: Factor, indices: Tensor, *, padding_idx: int, scale_grad_by_freq: bool, shape: torch.Size
) -> Factor | None:
    if padding_idx >= 0 or scale_grad_by_freq:  # whose gradients are other than the derivative
        return None
    return _looked_up(factor, indices, shape)


@register_pullback(aten.index_select.default)
def _selected(factor: Factor, index: Tensor, *, dim: int, shape: torch.Size) -> Factor | None:
    return _looked_up(factor, index, shape) if dim == 0 else None


@register_pullback(aten.index.Tensor)
def _indexed(factor: Factor, indices: list[Tensor | None], *, shape: torch.Size) -> Factor | None:
    first, *others = indices
    if first is None or first.dtype not in (torch.int64, torch.int32) or any(i is not None for i in others):
        return None
    return _looked_up(factor, first, shape)
