"""Whether dimension 0 of what a graph computes is the examples', one after the other, whatever the numbers are.

A value (b k, ...) whose rows k i ... k (i + 1) - 1 are those of example i *leads*. What a loss is given leads, and so does what
is made of such values by operations on each number, on each row, along other dimensions than 0, and by a reshape, which
keeps the order. A turn of a fold (`x.transpose(0, 1).flatten(0, 1)`), a shuffle of the batch or anything that is not known
here does not, even where the first numbers do not show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..base.equations import parse
from ..base.fakes import expression
from ..base.nodes import (
    batch_dims,
    by_name,
    draws,
    has_batch,
    is_model_of,
    is_of_batch,
    is_size,
    operation,
    value,
    written_memory,
)
from .along import SCANS, WINDOWS, given_dims, names

# the same numbers in the same places, or a row for each row
_ROWWISE = names("""
    clone detach alias contiguous to _to_copy lift_fresh lift_fresh_copy type_as one_hot permute transpose movedim swapaxes t mT
    adjoint numpy_T broadcast_tensors expand expand_as repeat_interleave real imag view_as_real view_as_complex conj conj_physical
""")
# number by number, though their tags may not say so
_POINTWISE = names("""
    masked_fill where fill zero copy nan_to_num isfinite isnan isinf softplus gelu mish silu relu relu6 leaky_relu elu celu selu
    hardtanh logsigmoid log_sigmoid square
""")
_RESHAPES = names("view reshape flatten unflatten _unsafe_view unsqueeze squeeze view_as reshape_as")
# along a dimension, or several
_ALONG = SCANS | names("""
    sum mean amax amin prod var std norm linalg_vector_norm logsumexp max min argmax argmin all any cosine_similarity var_mean
    std_mean nansum nanmean count_nonzero gather scatter select slice narrow split split_with_sizes chunk unbind cat
    index_select stack
""")
_LOSSES = names("""
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits poisson_nll_loss kl_div hinge_embedding_loss soft_margin_loss cosine_embedding_loss
    margin_ranking_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss
""")
_FILLED = names("zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like")


def lead(graph: fx.Graph, given: Iterable[fx.Node], outputs: Iterable[fx.Node], batch: Any) -> bool:
    """Whether the outputs lead where those given do: each is (b, ...), example by example."""
    found = _Leading(set(given), batch)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if found.keeps(node):
            found.leading.add(node)
        elif written_memory(node) and found.reads(node):  # into values that lead, perhaps
            return False
        elif found.crosses(node):
            found.crossing.add(node)
    return all(n in found.leading and found.factor(n) == 1 for n in outputs)


class _Leading:
    def __init__(self, given: set[fx.Node], batch: Any):
        self.leading, self._batch = given, batch
        self.crossing = set[fx.Node]()  # made of examples, or of their number, and not one for each

    def factor(self, node: fx.Node) -> Any:
        """k of a value (b k, ...)."""
        return expression(value(node).shape[0]) / self._batch

    def keeps(self, node: fx.Node) -> bool:
        """Whether a node's value leads; a value without the batch does not."""
        read = self.reads(node)
        results = value(node) if isinstance(value(node), tuple | list) else [value(node)]
        tensors = [v for v in results if isinstance(v, Tensor)]
        if not tensors or any(batch_dims(v, self._batch) != (0,) for v in tensors):
            return False
        if operation(node) == "index":
            return self._picks_from_each(node)
        if draws(node.target) or any(n not in self.leading for n in read):
            return False
        if not read:
            return operation(node) in _FILLED
        if not isinstance(node.target, OpOverload):  # a part of several results
            return True
        return self._operation_keeps(node, read, tensors[0])

    def crosses(self, node: fx.Node) -> bool:
        """Whether a value that does not lead depends on the examples, or on their number."""
        sizes = any(has_batch(value(n), self._batch) for n in node.all_input_nodes)
        return bool(self.reads(node)) or (sizes and isinstance(value(node), Tensor))

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The operands that depend on the examples, or on their number."""
        return [
            n
            for n in node.all_input_nodes
            if (n in self.crossing or is_of_batch(value(n), self._batch)) and not is_model_of(n, node)
        ]

    def _operation_keeps(self, node: fx.Node, read: list[fx.Node], result: Any) -> bool:
        name, target = operation(node).rstrip("_"), node.target
        named = by_name(target, node.args, node.kwargs)
        if name in _RESHAPES:
            return True
        if any(self._rows(n) != expression(result.shape[0]) for n in read if isinstance(value(n), Tensor)):
            return name == "repeat_interleave" and named.get("dim") == 0
        if name in _POINTWISE or torch.Tag.pointwise in target.tags:  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
            aligned = all(value(n).dim() == result.dim() for n in read)
            return aligned and not any(is_size(a, self._batch) for a in named.values())
        if name in _ROWWISE:
            return True
        if name in _LOSSES:
            return named.get("reduction") == 0
        if name in _ALONG:
            return _goes_along_others(name, named, value(read[0]).dim() + (name == "stack"))
        if window := WINDOWS.fullmatch(name):
            image = node.args[0]  # and no kernel of the examples'
            return read == [image] and value(read[0]).dim() == int(window[1]) + 2
        if name == "pairwise_distance":
            return all(value(n).dim() > 1 for n in read)
        return self._multiplies(name, named, read)

    def _rows(self, node: fx.Node) -> Any:
        val = value(node)
        first = val[0] if isinstance(val, tuple | list) else val
        return expression(first.shape[0])

    def _multiplies(self, name: str, named: dict[str, Any], read: list[fx.Node]) -> bool:
        """A matrix for all, or one for each."""
        if name in ("linear", "mm"):
            return len(read) == 1 and value(read[0]).dim() >= 2
        if name == "einsum":
            return _is_einsum_by_row(named["equation"], [n in read for n in named["tensors"]])
        if name == "cdist":
            return all(value(n).dim() >= 3 for n in read)
        if name in ("matmul", "bmm", "baddbmm"):
            alone = len(read) == 1 and named.get("self") is read[0] and value(read[0]).dim() >= 2
            return alone or all(value(n).dim() >= 3 for n in read)
        return False

    def _picks_from_each(self, node: fx.Node) -> bool:
        """`x[torch.arange(b), i]`, picks along other dimensions, or out of a table for all."""
        named = by_name(node.target, node.args, node.kwargs)
        x, (first, *others) = named["self"], named["indices"]
        if not (x in self.crossing or is_of_batch(value(x), self._batch)):
            places = [first, *others]
            return all(i in self.leading and value(i).dim() == value(first).dim() for i in places)
        if x not in self.leading:
            return False
        if first is None:
            return not any(i in self.crossing or is_of_batch(value(i), self._batch) for i in others if i)
        each = all(i in self.leading and value(i).dim() == 1 for i in others)
        return each and self.factor(x) == 1 and _is_every_place(first, self._batch)


def _is_einsum_by_row(equation: str, leading: list[bool]) -> bool:
    """Whether dimension 0 of the operands that lead is that of the result, and no other dimension of any."""
    operands, result = parse(equation)
    rows = result[:1]
    first = all(
        s[:1] == rows and rows not in s[1:] for s, leads in zip(operands, leading, strict=True) if leads
    )
    others = all(rows not in s for s, leads in zip(operands, leading, strict=True) if not leads)
    return bool(rows) and rows != "." and first and others and rows not in result[1:]


def _is_every_place(index: fx.Node, batch: Any) -> bool:
    """Whether an index is `torch.arange(b)`."""
    if operation(index) != "arange":
        return False
    named = by_name(index.target, index.args, index.kwargs)
    end = named["end"]
    end = value(end) if isinstance(end, fx.Node) else end
    whole = expression(end) == batch
    return whole and named.get("start", 0) in (0, None) and named.get("step", 1) in (1, None)


def _goes_along_others(name: str, named: dict[str, Any], rank: int) -> bool:
    if name == "slice" and named["dim"] == 0:  # `x[:, 1]` takes all of it first; the sizes have been compared
        return named.get("start") in (0, None) and named.get("step") == 1
    return 0 not in given_dims(named, rank)
