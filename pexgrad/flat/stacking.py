"""Stacked values (see `stacked.py`), and rules that many operations share: one call for all m members.

The shapes, for a member's (*shape):

    elementwise         (m, 1.., *shape): ones make the members' ranks equal
    along dimensions    (m, *shape), and every dimension that counts from the front is one further
    over the batch      (m*b, *rest): operations that treat the entries of dimension 0 alike

Operations with a formula of their own are in `stacking_layers.py`.
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


def register(*operations: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes `function(operation, m, a)` the rule for these operations."""

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        for operation in operations:
            _rules[operation] = lambda m, a, op=operation: function(op, m, a)
        return function

    return registered


def called(operation: Any, a: Arguments) -> Any:
    """The result for arguments by name."""
    args = [a[s.name] for s in operation._schema.arguments if not s.kwarg_only]
    return operation(*args, **{s.name: a[s.name] for s in operation._schema.arguments if s.kwarg_only})


def _map(function: Callable[[Tensor | Stacked], Any], tree: Any) -> Any:
    return pytree.tree_map(lambda v: function(v) if isinstance(v, Tensor | Stacked) else v, tree)


def _tensors(tree: Any) -> list[Tensor | Stacked]:
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, Tensor | Stacked)]


def rank_of(v: Tensor | Stacked) -> int:
    """The number of dimensions that each member's value has."""
    return v.dim if isinstance(v, Stacked) else v.dim()


def values_of(v: Tensor | Stacked) -> Tensor:
    """(m, *shape), or (*shape) where it is the same for all."""
    return v.values if isinstance(v, Stacked) else v


def full(v: Tensor | Stacked, m: int) -> Tensor:
    """(m, *shape), whether stacked or not."""
    return v.values if isinstance(v, Stacked) else v.expand(m, *v.shape)


def _stacked(tree: Any) -> Any:
    return pytree.tree_map(lambda t: Stacked(t) if isinstance(t, Tensor) else t, tree)


def split(tree: Any, m: int) -> Any:
    """(m*b, *rest) -> (m, b, *rest)."""
    return pytree.tree_map(lambda t: Stacked(t.unflatten(0, (m, -1))) if isinstance(t, Tensor) else t, tree)


# --- elementwise ------------------------------------------------------------------------------------


@register(
    aten.clone.default, aten._to_copy.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther,
    aten.tanh_backward.default, aten.threshold_backward.default, aten.sigmoid_backward.default,
    aten.gelu_backward.default, aten.silu_backward.default, aten.softplus_backward.default, aten.elu_backward.default,
    aten.leaky_relu_backward.default, aten.hardtanh_backward.default, aten.detach.default,
)  # fmt: skip
def _elementwise(operation: Any, m: int, a: Arguments) -> Any:
    if isinstance(a.get("value"), Stacked):  # what a mask is filled with may have no dimension
        return NotImplemented
    rank = max(map(rank_of, _tensors(a)))

    def aligned(v: Tensor | Stacked) -> Tensor:
        if not isinstance(v, Stacked):
            return v
        return v.values.reshape(m, *[1] * (rank - v.dim), *v.shape)

    a = dict(a)
    if a.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        a["memory_format"] = torch.preserve_format  # the formats are those of a member's rank
    return Stacked(called(operation, _map(aligned, a)))


@register(aten.copy.default)
def _copied(operation: Any, m: int, a: Arguments) -> Any:
    return _elementwise(operation, m, a | {"self": Stacked(full(a["self"], m))})


# --- along dimensions -------------------------------------------------------------------------------

_DIMS = ("dim", "dim0", "dim1", "dim2", "dims", "dimension")
_SIZES = ("size", "sizes", "shape", "input_sizes")
_OF_NUMBERS = {aten.unsqueeze.default, aten.reshape.default, aten.stack.default}


@register(
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
    if operation not in _OF_NUMBERS and not all(map(rank_of, _tensors(a))):
        return NotImplemented  # -1 is a dimension of a single number, but not of a stack of them
    if operation is aten.argmax.default and a["dim"] is None:
        return NotImplemented  # it takes one dimension, or all

    def moved(k: str, v: Any) -> Any:
        if k in _DIMS:
            return _further(v, a)
        if k in _SIZES and isinstance(v, Sequence):
            return [m, *v]
        return _map(lambda t: full(t, m), v)

    return _stacked(called(operation, {k: moved(k, v) for k, v in a.items()}))


def _further(dim: Any, a: Arguments) -> Any:
    """Dimensions that count from the front, one further; none means all of them."""
    if dim is None or dim == []:
        return list(range(1, max(map(rank_of, _tensors(a))) + 1))
    if isinstance(dim, Sequence):
        return [_further(d, a) for d in dim]
    return dim + 1 if dim >= 0 else dim


@register(aten.index_add.default, aten.index_copy.default, aten.index_select.default)
def _by_one_index(operation: Any, m: int, a: Arguments) -> Any:
    if isinstance(a["index"], Stacked):
        return NotImplemented
    own = {k: full(a[k], m) for k in ("self", "source") if k in a}
    return Stacked(called(operation, a | own | {"dim": _further(a["dim"], a)}))


@register(aten.permute.default)
def _permuted(operation: Any, m: int, a: Arguments) -> Any:
    x = a["self"]
    return Stacked(x.values.permute(0, *(d % x.dim + 1 for d in a["dims"])))


@register(aten.t.default)
def _transposed(operation: Any, m: int, a: Arguments) -> Any:
    return Stacked(a["self"].values.transpose(-1, -2)) if a["self"].dim == 2 else a["self"]


@register(aten.squeeze.default)
def _squeezed(operation: Any, m: int, a: Arguments) -> Any:
    return Stacked(a["self"].values.reshape(m, *(n for n in a["self"].shape if n != 1)))


@register(aten.expand.default, aten.repeat.default)
def _repeated(operation: Any, m: int, a: Arguments) -> Any:
    x, times = a["self"], a.get("repeats")
    sizes = a["size"] if times is None else times
    aligned = x.values.reshape(m, *[1] * (len(sizes) - x.dim), *x.shape)
    return Stacked(aligned.expand(m, *sizes) if times is None else aligned.repeat(1, *times))


@register(aten.sum.default, aten.mean.default)
def _reduce(operation: Any, m: int, a: Arguments) -> Any:
    reduce = torch.sum if operation is aten.sum.default else torch.mean
    return Stacked(reduce(a["self"].values.reshape(m, -1), 1, dtype=a["dtype"]))


@register(
    aten.new_empty_strided.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
)  # fmt: skip
def _constant(operation: Any, m: int, a: Arguments) -> Any:
    """The same for every member."""
    return called(operation, _map(lambda v: v.values[0] if isinstance(v, Stacked) else v, a))


# --- over the batch ---------------------------------------------------------------------------------


@register(
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten.im2col.default, aten.col2im.default,
)  # fmt: skip
def _over_the_batch(operation: Any, m: int, a: Arguments) -> Any:
    return split(called(operation, _map(lambda t: full(t, m).flatten(0, 1), a)), m)


@register(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
def _nll_loss(operation: Any, m: int, a: Arguments) -> Any:
    per_example = a["reduction"] == 0 and rank_of(a["self"]) == 2 and not isinstance(a["weight"], Stacked)
    if not per_example or not a["self"].shape[0]:
        return NotImplemented
    folded = {k: full(a[k], m).flatten(0, 1) for k in ("grad_output", "self", "target") if k in a}
    if "total_weight" not in a:
        losses, total = called(operation, a | folded)
        return split(losses, m), total
    total = a["total_weight"]  # which plays no part in the losses of each example
    folded["total_weight"] = total.values[0] if isinstance(total, Stacked) else total
    return split(called(operation, a | folded), m)
