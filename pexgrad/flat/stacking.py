"""Rules for operations of stacked values (see `stacked.py`): one call for all m members.

The shapes, for a member's (*shape):

    elementwise         (m, 1.., *shape): ones make the members' ranks equal
    along dimensions    (m, *shape), and every dimension that counts from the front is one further
    over the batch      (m*b, *rest): operations that treat the entries of dimension 0 alike
    products            (m, n, k) @ (m, k, p)
    convolution         x (b, m*c, *s), weight (m*d, c/g, *k), with m*g groups
    normalisation       over the batch, without weight and bias, which then are elementwise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Arguments = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Stacked:
    """The values of all members: (m, *shape)."""

    values: Tensor

    @property
    def dim(self) -> int:
        """The number of dimensions that each member's value has."""
        return self.values.dim() - 1

    @property
    def shape(self) -> torch.Size:
        """The shape of each member's value."""
        return self.values.shape[1:]


# (members, arguments by name) -> the operation's result, or NotImplemented for arguments that need the loop
Rule = Callable[[int, dict[str, Any]], Any]

_rules: dict[Any, Rule] = {}


def rule_for(operation: Any) -> Rule | None:
    """The rule for an operation, if there is one."""
    rule = _rules.get(operation)
    if rule is None and torch.Tag.pointwise in operation.tags and not operation._schema.is_mutable:
        return lambda m, a: _elementwise(operation, m, a)
    return rule


def _register(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for operation in operations:
            _rules[operation] = lambda m, a, op=operation: function(op, m, a)
        return function

    return register


def _map(function: Callable[[Tensor | Stacked], Any], tree: Any) -> Any:
    return pytree.tree_map(lambda v: function(v) if isinstance(v, Tensor | Stacked) else v, tree)


def _tensors(tree: Any) -> list[Tensor | Stacked]:
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, Tensor | Stacked)]


def _rank(v: Tensor | Stacked) -> int:
    return v.dim if isinstance(v, Stacked) else v.dim()


def _full(v: Tensor | Stacked, m: int) -> Tensor:
    """(m, *shape), whether stacked or not."""
    return v.values if isinstance(v, Stacked) else v.expand(m, *v.shape)


def _stacked(tree: Any) -> Any:
    return pytree.tree_map(lambda t: Stacked(t) if isinstance(t, Tensor) else t, tree)


# --- elementwise ------------------------------------------------------------------------------------


@_register(
    aten.clone.default, aten._to_copy.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.tanh_backward.default, aten.threshold_backward.default, aten.sigmoid_backward.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.softplus_backward.default, aten.elu_backward.default,
    aten.leaky_relu_backward.default, aten.hardtanh_backward.default, aten.detach.default, aten.copy.default,
)  # fmt: skip
def _elementwise(operation: Any, m: int, a: Arguments) -> Any:
    rank = max(map(_rank, _tensors(a)))

    def aligned(v: Tensor | Stacked) -> Tensor:
        if not isinstance(v, Stacked):
            return v
        return v.values.reshape(m, *[1] * (rank - v.dim), *v.shape)

    a = dict(a)
    if a.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        a["memory_format"] = torch.preserve_format  # the formats are those of a member's rank
    return Stacked(_call(operation, _map(aligned, a)))


def _call(operation: Any, a: Arguments) -> Any:
    args = [a[s.name] for s in operation._schema.arguments if not s.kwarg_only]
    return operation(*args, **{s.name: a[s.name] for s in operation._schema.arguments if s.kwarg_only})


# --- along dimensions -------------------------------------------------------------------------------

_DIMS = ("dim", "dim0", "dim1", "dim2", "dims", "dimension")
_SIZES = ("size", "sizes", "shape", "input_sizes")


@_register(
    aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int,
    aten.slice.Tensor, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim,
    aten.linalg_vector_norm.default, aten.var.correction, aten.logsumexp.default, aten.prod.dim_int,
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.cumsum.default, aten.gather.default, aten.scatter_add.default,
    aten.scatter.src, aten.scatter.value, aten.flip.default, aten.cat.default, aten.stack.default, aten.unfold.default,
    aten.select_backward.default, aten.slice_backward.default, aten.diagonal.default, aten.reshape.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.sort.default, aten.max.dim, aten.min.dim, aten.argmax.default,
    aten.unbind.int, aten._safe_softmax.default,
    aten.select_scatter.default, aten.slice_scatter.default, aten.unfold_backward.default,
    aten.tril.default, aten.triu.default, aten.constant_pad_nd.default,
)  # fmt: skip
def _along_dimensions(operation: Any, m: int, a: Arguments) -> Any:
    if operation not in _OF_NUMBERS and not all(map(_rank, _tensors(a))):
        return NotImplemented  # -1 is a dimension of a single number, but not of a stack of them

    def moved(k: str, v: Any) -> Any:
        if k in _DIMS:
            return _further(v, a)
        if k in _SIZES and isinstance(v, Sequence):
            return [m, *v]
        return _map(lambda t: _full(t, m), v)

    return _stacked(_call(operation, {k: moved(k, v) for k, v in a.items()}))


_OF_NUMBERS = {aten.unsqueeze.default, aten.reshape.default, aten.stack.default}


def _further(dim: Any, a: Arguments) -> Any:
    """Dimensions that count from the front, one further; none means all of them."""
    if dim is None or dim == []:
        return list(range(1, max(map(_rank, _tensors(a))) + 1))
    if isinstance(dim, Sequence):
        return [_further(d, a) for d in dim]
    return dim + 1 if dim >= 0 else dim


@_register(aten.index_add.default, aten.index_copy.default, aten.index_select.default)
def _by_one_index(operation: Any, m: int, a: Arguments) -> Any:
    if isinstance(a["index"], Stacked):
        return NotImplemented
    full = {k: _full(a[k], m) for k in ("self", "source") if k in a}
    return Stacked(_call(operation, a | full | {"dim": _further(a["dim"], a)}))


@_register(aten.permute.default)
def _permuted(operation: Any, m: int, a: Arguments) -> Any:
    x = a["self"]
    return Stacked(x.values.permute(0, *(d % x.dim + 1 for d in a["dims"])))


@_register(aten.t.default)
def _transposed(operation: Any, m: int, a: Arguments) -> Any:
    return Stacked(a["self"].values.transpose(-1, -2)) if a["self"].dim == 2 else a["self"]


@_register(aten.squeeze.default)
def _squeezed(operation: Any, m: int, a: Arguments) -> Any:
    return Stacked(a["self"].values.reshape(m, *(n for n in a["self"].shape if n != 1)))


@_register(aten.repeat.default)
def _repeat(operation: Any, m: int, a: Arguments) -> Any:
    x, repeats = a["self"], a["repeats"]
    return Stacked(x.values.reshape(m, *[1] * (len(repeats) - x.dim), *x.shape).repeat(1, *repeats))


@_register(aten.expand.default)
def _expand(operation: Any, m: int, a: Arguments) -> Any:
    x, size = a["self"], list(a["size"])
    return Stacked(x.values.reshape(m, *[1] * (len(size) - x.dim), *x.shape).expand(m, *size))


@_register(aten.sum.default, aten.mean.default)
def _reduce(operation: Any, m: int, a: Arguments) -> Any:
    reduce = torch.sum if operation is aten.sum.default else torch.mean
    return Stacked(reduce(a["self"].values.reshape(m, -1), 1, dtype=a["dtype"]))


@_register(
    aten.new_empty_strided.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
)  # fmt: skip
def _constant(operation: Any, m: int, a: Arguments) -> Any:
    """The same for every member."""
    return _call(operation, _map(lambda v: v.values[0] if isinstance(v, Stacked) else v, a))


# --- over the batch ---------------------------------------------------------------------------------


@_register(
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten.im2col.default, aten.col2im.default,
)  # fmt: skip
def _over_the_batch(operation: Any, m: int, a: Arguments) -> Any:
    return _split(_call(operation, _map(lambda t: _full(t, m).flatten(0, 1), a)), m)


def _split(tree: Any, m: int) -> Any:
    return pytree.tree_map(lambda t: Stacked(t.unflatten(0, (m, -1))) if isinstance(t, Tensor) else t, tree)


@_register(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
def _nll_loss(operation: Any, m: int, a: Arguments) -> Any:
    per_example = a["reduction"] == 0 and _rank(a["self"]) == 2 and not isinstance(a["weight"], Stacked)
    if not per_example or not a["self"].shape[0]:
        return NotImplemented
    folded = {k: _full(a[k], m).flatten(0, 1) for k in ("grad_output", "self", "target") if k in a}
    if "total_weight" not in a:
        losses, total = _call(operation, a | folded)
        return _split(losses, m), total
    total = a["total_weight"]  # which plays no part in the losses of each example
    folded["total_weight"] = total.values[0] if isinstance(total, Stacked) else total
    return _split(_call(operation, a | folded), m)


# --- products ---------------------------------------------------------------------------------------


def _values(v: Tensor | Stacked) -> Tensor:
    return v.values if isinstance(v, Stacked) else v


@_register(aten.mm.default)
def _mm(operation: Any, m: int, a: Arguments) -> Any:
    return Stacked(torch.matmul(_values(a["self"]), _values(a["mat2"])))


@_register(aten.bmm.default)
def _bmm(operation: Any, m: int, a: Arguments) -> Any:
    left, right = (_full(a[k], m).flatten(0, 1) for k in ("self", "mat2"))
    if not left.shape[0]:
        return NotImplemented
    return Stacked(torch.bmm(left, right).unflatten(0, (m, -1)))


@_register(aten.addmm.default)
def _addmm(operation: Any, m: int, a: Arguments) -> Any:
    bias = _full(a["self"], m)
    if bias.dim() == 2:
        bias = bias[:, None]
    left, right = (_full(a[k], m) for k in ("mat1", "mat2"))
    return Stacked(torch.baddbmm(bias, left, right, beta=a["beta"], alpha=a["alpha"]))


@_register(aten.mv.default, aten.dot.default)
def _vectors(operation: Any, m: int, a: Arguments) -> Any:
    matrix, vector = a.values()
    product = torch.matmul(_full(matrix, m).unsqueeze(-2) if _rank(matrix) == 1 else _full(matrix, m),
                           _full(vector, m).unsqueeze(-1)).squeeze(-1)  # fmt: skip
    return Stacked(product.squeeze(-1) if _rank(matrix) == 1 else product)


# --- convolution ------------------------------------------------------------------------------------


def _channels(v: Tensor | Stacked, m: int) -> Tensor:
    """(m, b, c, *s) -> (b, m*c, *s)."""
    return _full(v, m).transpose(0, 1).flatten(1, 2)


def _members(x: Tensor, m: int) -> Stacked:
    """(b, m*c, *s) -> (m, b, c, *s)."""
    return Stacked(x.unflatten(1, (m, -1)).transpose(0, 1))


@_register(aten.convolution.default)
def _convolution(operation: Any, m: int, a: Arguments) -> Any:
    x, weight, bias = a["input"], a["weight"], a["bias"]
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return _split(_call(operation, a | {"input": x.values.flatten(0, 1)}), m)
    joined = {"weight": _full(weight, m).flatten(0, 1)}
    if bias is not None:
        joined["bias"] = _full(bias, m).flatten()
    shared = not isinstance(x, Stacked) and a["groups"] == 1 and not a["transposed"]
    if not shared:  # else every kernel sees the same channels
        joined |= {"input": _channels(x, m), "groups": m * a["groups"]}
    return _members(_call(operation, a | joined), m)


@_register(aten.convolution_backward.default)
def _convolution_backward(operation: Any, m: int, a: Arguments) -> Any:
    joined = {
        "grad_output": _channels(a["grad_output"], m),
        "input": _channels(a["input"], m),
        "weight": _full(a["weight"], m).flatten(0, 1),
        "groups": m * a["groups"],
        "bias_sizes": None if a["bias_sizes"] is None else [m * n for n in a["bias_sizes"]],
    }
    x, weight, bias = _call(operation, a | joined)
    return None if x is None else _members(x, m), *_split((weight, bias), m)


# --- normalisation ----------------------------------------------------------------------------------


def _affine(out: Stacked, weight: Any, bias: Any, spread: Callable[[Tensor], Tensor]) -> Stacked:
    values = out.values
    for v, apply in ((weight, torch.mul), (bias, torch.add)):
        if v is not None:
            values = apply(values, spread(_values(v)))
    return Stacked(values)


def _spread_last(x: Stacked | Tensor, dims: int) -> Callable[[Tensor], Tensor]:
    """For weights over the last `dims` dimensions: (m, *w) -> (m, 1.., *w)."""

    def spread(w: Tensor) -> Tensor:
        return w if w.dim() == dims else w.reshape(w.shape[0], *[1] * (_rank(x) - dims), *w.shape[1:])

    return spread


def _spread_channels(x: Stacked | Tensor) -> Callable[[Tensor], Tensor]:
    """For weights over channels: (m, c) -> (m, 1, c, 1..)."""

    def spread(w: Tensor) -> Tensor:
        return w.reshape(*w.shape[:-1], *[1] * (w.dim() - 1), w.shape[-1], *[1] * (_rank(x) - 2))

    return spread


@_register(aten.native_layer_norm.default)
def _layer_norm(operation: Any, m: int, a: Arguments) -> Any:
    x, dims = a["input"], len(a["normalized_shape"])
    out, mean, rstd = _call(operation, a | {"input": _full(x, m), "weight": None, "bias": None})
    return _affine(Stacked(out), a["weight"], a["bias"], _spread_last(x, dims)), Stacked(mean), Stacked(rstd)


@_register(aten.native_layer_norm_backward.default)
def _layer_norm_backward(operation: Any, m: int, a: Arguments) -> Any:
    if a["output_mask"][1] or a["output_mask"][2]:
        return NotImplemented
    spread = _spread_last(a["input"], len(a["normalized_shape"]))
    g = _affine(Stacked(_full(a["grad_out"], m)), a["weight"], None, spread).values
    own = {k: _full(a[k], m).contiguous() for k in ("input", "mean", "rstd")}
    x, _, _ = _call(operation, a | own | {"grad_out": g.contiguous(), "weight": None, "bias": None})
    return Stacked(x), None, None


@_register(aten.native_group_norm.default)
def _group_norm(operation: Any, m: int, a: Arguments) -> Any:
    x = a["input"]
    plain = {"input": _full(x, m).flatten(0, 1), "weight": None, "bias": None, "N": m * a["N"]}
    out, mean, rstd = _split(_call(operation, a | plain), m)
    return _affine(out, a["weight"], a["bias"], _spread_channels(x)), mean, rstd


@_register(aten.native_group_norm_backward.default)
def _group_norm_backward(operation: Any, m: int, a: Arguments) -> Any:
    if a["output_mask"][1] or a["output_mask"][2]:
        return NotImplemented
    g = _affine(Stacked(_full(a["grad_out"], m)), a["weight"], None, _spread_channels(a["input"])).values
    own = {k: _full(a[k], m).flatten(0, 1).contiguous() for k in ("input", "mean", "rstd")}
    x, _, _ = _call(
        operation, a | own | {"grad_out": g.flatten(0, 1).contiguous(), "weight": None, "N": m * a["N"]}
    )
    return _split(x, m), None, None


# --- indexing ---------------------------------------------------------------------------------------


@_register(aten.embedding.default)
def _embedding(operation: Any, m: int, a: Arguments) -> Any:
    table, ids = a["weight"], a["indices"]
    if not isinstance(table, Stacked):
        return Stacked(_call(operation, a | {"indices": ids.values}))
    if not isinstance(ids, Stacked):
        return Stacked(table.values[:, ids])
    return Stacked(table.values[_each(m, ids.dim, ids.values.device), ids.values])


def _each(m: int, dims: int, device: torch.device) -> Tensor:
    """(m, 1..): the number of each member."""
    return torch.arange(m, device=device).reshape(m, *[1] * dims)


@_register(aten.index.Tensor, aten.index_put.default)
def _index(operation: Any, m: int, a: Arguments) -> Any:
    indices = a["indices"]
    if any(i is None for i in indices) or any(_values(i).dtype == torch.bool for i in indices):
        return NotImplemented
    rank = max(map(_rank, indices))
    full = [_full(i, m).reshape(m, *[1] * (rank - _rank(i)), *i.shape) for i in indices]
    moved = a | {"self": _full(a["self"], m), "indices": [_each(m, rank, full[0].device), *full]}
    if "values" in a:
        values = a["values"]  # (*index, *rest), with fewer dimensions where it is broadcast
        expected = rank + _rank(a["self"]) - len(indices)
        moved["values"] = _full(values, m).reshape(m, *[1] * (expected - _rank(values)), *values.shape)
    return Stacked(_call(operation, moved))
