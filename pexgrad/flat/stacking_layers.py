"""Rules for operations of stacked values (see `stacking.py`) that have a formula of their own.

The shapes, for a member's (*shape):

    products            (m, n, k) @ (m, k, p)
    convolution         x (b, m*c, *s), weight (m*d, c/g, *k), with m*g groups
    normalisation       over the batch, without weight and bias, which then are elementwise
    indexing            the member's number is one more index, before the others
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .stacking import Arguments, Stacked, called, full, rank_of, register, split, values_of

aten = torch.ops.aten


# --- products ---------------------------------------------------------------------------------------


@register(aten.mm.default)
def _mm(operation: Any, m: int, a: Arguments) -> Any:
    return Stacked(torch.matmul(values_of(a["self"]), values_of(a["mat2"])))


@register(aten.bmm.default)
def _bmm(operation: Any, m: int, a: Arguments) -> Any:
    left, right = (full(a[k], m).flatten(0, 1) for k in ("self", "mat2"))
    if not left.shape[0]:
        return NotImplemented
    return Stacked(torch.bmm(left, right).unflatten(0, (m, -1)))


@register(aten.addmm.default)
def _addmm(operation: Any, m: int, a: Arguments) -> Any:
    bias = full(a["self"], m)
    if bias.dim() == 2:
        bias = bias[:, None]
    left, right = (full(a[k], m) for k in ("mat1", "mat2"))
    return Stacked(torch.baddbmm(bias, left, right, beta=a["beta"], alpha=a["alpha"]))


@register(aten.mv.default, aten.dot.default)
def _vectors(operation: Any, m: int, a: Arguments) -> Any:
    matrix, vector = a.values()
    product = torch.matmul(full(matrix, m).unsqueeze(-2) if rank_of(matrix) == 1 else full(matrix, m),
                           full(vector, m).unsqueeze(-1)).squeeze(-1)  # fmt: skip
    return Stacked(product.squeeze(-1) if rank_of(matrix) == 1 else product)


# --- convolution ------------------------------------------------------------------------------------


def _channels(v: Tensor | Stacked, m: int) -> Tensor:
    """(m, b, c, *s) -> (b, m*c, *s)."""
    return full(v, m).transpose(0, 1).flatten(1, 2)


def _members(x: Tensor, m: int) -> Stacked:
    """(b, m*c, *s) -> (m, b, c, *s)."""
    return Stacked(x.unflatten(1, (m, -1)).transpose(0, 1))


@register(aten.convolution.default)
def _convolution(operation: Any, m: int, a: Arguments) -> Any:
    x, weight, bias = a["input"], a["weight"], a["bias"]
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return split(called(operation, a | {"input": x.values.flatten(0, 1)}), m)
    joined = {"weight": full(weight, m).flatten(0, 1)}
    if bias is not None:
        joined["bias"] = full(bias, m).flatten()
    shared = not isinstance(x, Stacked) and a["groups"] == 1 and not a["transposed"]
    if not shared:  # else every kernel sees the same channels
        joined |= {"input": _channels(x, m), "groups": m * a["groups"]}
    return _members(called(operation, a | joined), m)


@register(aten.convolution_backward.default)
def _convolution_backward(operation: Any, m: int, a: Arguments) -> Any:
    joined = {
        "grad_output": _channels(a["grad_output"], m),
        "input": _channels(a["input"], m),
        "weight": full(a["weight"], m).flatten(0, 1),
        "groups": m * a["groups"],
        "bias_sizes": None if a["bias_sizes"] is None else [m * n for n in a["bias_sizes"]],
    }
    x, weight, bias = called(operation, a | joined)
    return None if x is None else _members(x, m), *split((weight, bias), m)


# --- normalisation ----------------------------------------------------------------------------------


def _affine(out: Stacked, weight: Any, bias: Any, spread: Callable[[Tensor], Tensor]) -> Stacked:
    values = out.values
    for v, apply in ((weight, torch.mul), (bias, torch.add)):
        if v is not None:
            values = apply(values, spread(values_of(v)))
    return Stacked(values)


def _spread_last(x: Stacked | Tensor, dims: int) -> Callable[[Tensor], Tensor]:
    """For weights over the last `dims` dimensions: (m, *w) -> (m, 1.., *w)."""

    def spread(w: Tensor) -> Tensor:
        return w if w.dim() == dims else w.reshape(w.shape[0], *[1] * (rank_of(x) - dims), *w.shape[1:])

    return spread


def _spread_channels(x: Stacked | Tensor) -> Callable[[Tensor], Tensor]:
    """For weights over channels: (m, c) -> (m, 1, c, 1..)."""

    def spread(w: Tensor) -> Tensor:
        return w.reshape(*w.shape[:-1], *[1] * (w.dim() - 1), w.shape[-1], *[1] * (rank_of(x) - 2))

    return spread


@register(aten.native_layer_norm.default)
def _layer_norm(operation: Any, m: int, a: Arguments) -> Any:
    x, dims = a["input"], len(a["normalized_shape"])
    out, mean, rstd = called(operation, a | {"input": full(x, m), "weight": None, "bias": None})
    return _affine(Stacked(out), a["weight"], a["bias"], _spread_last(x, dims)), Stacked(mean), Stacked(rstd)


@register(aten.native_layer_norm_backward.default)
def _layer_norm_backward(operation: Any, m: int, a: Arguments) -> Any:
    if a["output_mask"][1] or a["output_mask"][2]:
        return NotImplemented
    spread = _spread_last(a["input"], len(a["normalized_shape"]))
    g = _affine(Stacked(full(a["grad_out"], m)), a["weight"], None, spread).values
    own = {k: full(a[k], m).contiguous() for k in ("input", "mean", "rstd")}
    x, _, _ = called(operation, a | own | {"grad_out": g.contiguous(), "weight": None, "bias": None})
    return Stacked(x), None, None


@register(aten.native_group_norm.default)
def _group_norm(operation: Any, m: int, a: Arguments) -> Any:
    x = a["input"]
    plain = {"input": full(x, m).flatten(0, 1), "weight": None, "bias": None, "N": m * a["N"]}
    out, mean, rstd = split(called(operation, a | plain), m)
    return _affine(out, a["weight"], a["bias"], _spread_channels(x)), mean, rstd


@register(aten.native_group_norm_backward.default)
def _group_norm_backward(operation: Any, m: int, a: Arguments) -> Any:
    if a["output_mask"][1] or a["output_mask"][2]:
        return NotImplemented
    g = _affine(Stacked(full(a["grad_out"], m)), a["weight"], None, _spread_channels(a["input"])).values
    own = {k: full(a[k], m).flatten(0, 1).contiguous() for k in ("input", "mean", "rstd")}
    x, _, _ = called(
        operation, a | own | {"grad_out": g.flatten(0, 1).contiguous(), "weight": None, "N": m * a["N"]}
    )
    return split(x, m), None, None


# --- indexing ---------------------------------------------------------------------------------------


@register(aten.embedding.default)
def _embedding(operation: Any, m: int, a: Arguments) -> Any:
    table, ids = a["weight"], a["indices"]
    if not isinstance(table, Stacked):
        return Stacked(called(operation, a | {"indices": ids.values}))
    if not isinstance(ids, Stacked):
        return Stacked(table.values[:, ids])
    return Stacked(table.values[_each(m, ids.dim, ids.values.device), ids.values])


def _each(m: int, dims: int, device: torch.device) -> Tensor:
    """(m, 1..): the number of each member."""
    return torch.arange(m, device=device).reshape(m, *[1] * dims)


@register(aten.index.Tensor, aten.index_put.default)
def _index(operation: Any, m: int, a: Arguments) -> Any:
    indices = a["indices"]
    if any(i is None for i in indices) or any(values_of(i).dtype == torch.bool for i in indices):
        return NotImplemented
    rank = max(map(rank_of, indices))
    moved = [full(i, m).reshape(m, *[1] * (rank - rank_of(i)), *i.shape) for i in indices]
    given = a | {"self": full(a["self"], m), "indices": [_each(m, rank, moved[0].device), *moved]}
    if "values" in a:
        values = a["values"]  # (*index, *rest), with fewer dimensions where it is broadcast
        expected = rank + rank_of(a["self"]) - len(indices)
        given["values"] = full(values, m).reshape(m, *[1] * (expected - rank_of(values)), *values.shape)
    return Stacked(called(operation, given))
