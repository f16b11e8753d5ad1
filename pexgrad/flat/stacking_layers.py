"""Rules for operations of stacked values (see `stacking.py`) that have a formula of their own.

The shapes, for a member's (*shape):

    products            (m, n, k) @ (m, k, p)
    convolution         x (b, m*c, *s), weight (m*d, c/g, *k), with m*g groups
    normalisation       (m*b, *rest), without weight and bias, which then are elementwise
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .stacking import Arguments, Stacked, called, full, rank_of, register, split, values_of

aten = torch.ops.aten


# --- products ---------------------------------------------------------------------------------------


@register(aten.bmm.default)
def _bmm(operation: Any, m: int, a: Arguments) -> Any:
    left, right = (full(a[k], m).flatten(0, 1) for k in ("self", "mat2"))
    if not left.shape[0]:  # of nothing, `unflatten` cannot tell the parts
        return NotImplemented
    return Stacked(torch.bmm(left, right).unflatten(0, (m, -1)))


@register(aten.mm.default, aten.mv.default, aten.dot.default)
def _product(operation: Any, m: int, a: Arguments) -> Any:
    left, right = a.values()
    row, column = rank_of(left) == 1, rank_of(right) == 1
    if not row and not column:
        return Stacked(torch.matmul(values_of(left), values_of(right)))
    product = torch.matmul(full(left, m)[:, None] if row else full(left, m), full(right, m)[..., None])
    return Stacked(product.flatten(0 if row else 1))


@register(aten.addmm.default)
def _addmm(operation: Any, m: int, a: Arguments) -> Any:
    bias = full(a["self"], m)
    bias = bias.reshape(m, *[1] * (3 - bias.dim()), *bias.shape[1:])
    left, right = (full(a[k], m) for k in ("mat1", "mat2"))
    return Stacked(torch.baddbmm(bias, left, right, beta=a["beta"], alpha=a["alpha"]))


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


def _affine(x: Stacked, weight: Any, bias: Any, behind: int) -> Stacked:
    """x times a weight plus a bias, each (m, 1.., *w, 1..) with so many dimensions of x behind its own."""
    values = x.values
    for v, apply in ((weight, torch.mul), (bias, torch.add)):
        if v is not None:
            lead = [len(values), *[1] * (x.dim - behind - rank_of(v))] if isinstance(v, Stacked) else []
            values = apply(values, values_of(v).reshape(*lead, *v.shape, *[1] * behind))
    return Stacked(values)


def _plain(m: int, a: Arguments) -> Arguments:
    """The arguments of a normalisation without weight and bias, with the members in the batch."""
    own = {k: full(a[k], m).flatten(0, 1) for k in ("grad_out", "input", "mean", "rstd") if k in a}
    nothing = dict.fromkeys(a.keys() & {"weight", "bias"})
    return a | {k: v.contiguous() for k, v in own.items()} | nothing | ({"N": m * a["N"]} if "N" in a else {})


def _has_no_batch(a: Arguments) -> bool:
    """Whether it normalises all of its input, so that there is no batch to put the members in."""
    return rank_of(a["input"]) == len(a.get("normalized_shape", ()))


def _behind(a: Arguments) -> int:
    """How many dimensions are behind those of the weight: none in a layer norm, all behind the channels in a group norm."""
    return rank_of(a["input"]) - 2 if "N" in a else 0


@register(aten.native_layer_norm.default, aten.native_group_norm.default)
def _normalised(operation: Any, m: int, a: Arguments) -> Any:
    if _has_no_batch(a):
        return NotImplemented
    out, mean, rstd = split(called(operation, _plain(m, a)), m)
    return _affine(out, a["weight"], a["bias"], _behind(a)), mean, rstd


@register(aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default)
def _normalised_backward(operation: Any, m: int, a: Arguments) -> Any:
    if _has_no_batch(a) or a["output_mask"][1] or a["output_mask"][2]:
        return NotImplemented
    g = _affine(Stacked(full(a["grad_out"], m)), a["weight"], None, _behind(a))
    x, _, _ = called(operation, _plain(m, a | {"grad_out": g}))
    return split(x, m), None, None
