"""Operations that compute each example's part of their result from that example's parts of their operands, and from nothing else.

A rule is given an operation, and where its operands have their examples. It returns the `lead` of the result's layout (how large
the fold is, and on which dimension, its shape tells), or None where examples may mix or change places. What is not written down
here is not known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..base.equations import written_out
from ..base.nodes import by_name, fold_factor_of, is_size, operation, sizes_in, value
from .along import SCANS, SLICES, WINDOWS, dims_of, names
from .layout import Layout


@dataclass(frozen=True, eq=False)
class Step:
    """An operation on operands whose examples are tracked."""

    node: fx.Node
    read: dict[fx.Node, Layout]  # the operands with examples; where rules are asked, one at least
    own: Set[fx.Node]  # those among them that are nothing but each example's place in the batch
    result: Tensor  # fake; the first of several
    dim: int  # its batch dimension
    fold: int  # how often that holds the batch
    batch: Any

    @property
    def name(self) -> str:
        """Of the operation."""
        return _name(self.node)

    @cached_property
    def named(self) -> dict[str, Any]:
        """Every argument by its name in the schema."""
        return by_name(self.node.target, self.node.args, self.node.kwargs)

    @property
    def first(self) -> tuple[Tensor, Layout]:
        """The first operand with examples."""
        node, at = next(iter(self.read.items()))
        return value(node), at

    def reads_only(self, argument: Any) -> bool:
        """Whether no other operand has examples."""
        return [*self.read] == [argument]

    def reads_only_its_first(self) -> bool:
        """Whether no operand but that of the first argument has examples: no weight, say."""
        return self.reads_only(next(iter(self.named.values())))

    def lead_if(self, fits: Callable[[Tensor, Layout], bool]) -> int | None:
        """The lead of every operand, where all fit and are folded like the result."""
        if any(at.fold != self.fold or not fits(value(n), at) for n, at in self.read.items()):
            return None
        leads = {at.lead for at in self.read.values()}
        return leads.pop() if len(leads) == 1 else None

    def lead(self) -> int | None:
        """The same, wherever the batch is."""
        return self.lead_if(lambda v, at: True)

    def lead_aligned(self, behind: int = 0) -> int | None:
        """The same, where the batch is on one dimension counted from the last, with so many behind it at least."""
        from_last = self.result.dim() - self.dim
        return self.lead_if(lambda v, at: v.dim() - at.dim == from_last > behind)

    def lead_beside(self, dims: set[int]) -> int | None:
        """The same, where operands of one rank have the batch on one dimension, which is none of these."""
        places = {(value(n).dim(), at.dim) for n, at in self.read.items()}
        return self.lead() if len(places) == 1 and not {d for _, d in places} & dims else None


Rule = Callable[[Step], int | None]


def rule_of(node: fx.Node, batch: Any) -> Rule | None:
    """How an operation hands the places of examples on; None where it is not known, or given a number made of the batch size."""
    if node.target is operator.getitem:  # one of several results
        return _same
    if not _is_torchs(node.target):
        return None
    name = _name(node)
    if name not in _SIZED and sizes_in(node, batch):
        return None
    if torch.Tag.pointwise in node.target.tags:
        return _aligned
    if window := WINDOWS.fullmatch(name):
        return _on_last(int(window[1]) + name.startswith("conv"))
    return _RULES.get(name)


def rule_of_same(node: fx.Node) -> Rule | None:
    """The rule of an operation whose result has the very numbers of its operand; None for others."""
    name = operation(node)
    return _RULES.get(name) if _is_torchs(node.target) and name in _SAME else None


def is_alike_for_all(node: fx.Node, batch: Any) -> bool:
    """Whether an operation without examples gives the same to each: one number, random ones, or copies of something."""
    name = operation(node)
    if not _is_torchs(node.target) or name not in _FILLED | _COPIED:
        return False
    return not is_size(by_name(node.target, node.args, node.kwargs).get("fill_value"), batch)


def _is_torchs(operation: Any) -> TypeGuard[OpOverload]:
    """Whether an operation is one of torch's own, so that its name tells what it does."""
    return isinstance(operation, OpOverload) and operation.namespace == "aten"


def _name(node: fx.Node) -> str:
    """Of an operation, in place or not."""
    name = operation(node)
    return name if name.startswith("__") else name.removesuffix("_")


def is_index(node: fx.Node) -> bool:
    """Whether a node picks by an index."""
    return node.target is torch.ops.aten.index.Tensor


def is_range(node: fx.Node, batch: Any) -> bool:
    """Whether it is `torch.arange(b)`."""
    if not _is_torchs(node.target) or operation(node) != "arange":
        return False
    named = by_name(node.target, node.args, node.kwargs)
    whole = is_size(named["end"], batch) and fold_factor_of(value(node), batch) == 1
    return whole and named.get("start", 0) in (0, None) and named.get("step", 1) in (1, None)


def _aligned(s: Step) -> int | None:
    """Number by number."""
    return s.lead_aligned()


def _same(s: Step) -> int | None:
    """The same numbers, their dimensions in another order: one of them is still the batch."""
    return s.lead()


def _reshaped(s: Step) -> int | None:
    """In the order of memory, as many positions are in front of the examples as before."""
    operand, at = s.first
    in_front = math.prod(operand.shape[: at.dim]) * at.lead
    dims = math.prod(s.result.shape[: s.dim])
    # of no numbers at all there is no order
    return None if not in_front or in_front % dims else in_front // dims


def _each_repeated(s: Step) -> int | None:
    operand, at = s.first
    along = s.named.get("dim")
    if len(s.read) > 1 or along is None or not isinstance(s.named["repeats"], int):
        return None
    return at.lead if along % operand.dim() == at.dim else s.lead()


def _along(s: Step) -> int | None:
    """Along some dimensions."""
    operand, _ = s.first
    return s.lead_beside(dims_of(s.name, s.named, operand.dim()))


def _stacked(s: Step) -> int | None:
    return s.lead_beside(set())  # a new dimension, so that the batch is on its own


def _sliced(s: Step) -> int | None:
    operand, at = s.first
    if s.named["dim"] % operand.dim() != at.dim:
        return None if sizes_in(s.node, s.batch) else s.lead()
    # `x[:, 1]` takes all of the batch first; whether it is all, its size tells
    return s.lead() if s.named["start"] in (0, None) and s.named["step"] == 1 else None


def _picked(s: Step) -> int | None:
    """Places in an example's own numbers; what is not the examples' would be read at the example's place."""
    tensors = [n for n in s.node.all_input_nodes if isinstance(value(n), Tensor)]
    return _along(s) if all(n in s.read for n in tensors) else None


def _selected(s: Step) -> int | None:
    if s.reads_only(s.named["index"]):  # in a table
        return s.lead()
    return _along(s) if s.reads_only(s.named["self"]) else None


def _looked_up(s: Step) -> int | None:
    return s.lead() if s.reads_only(s.named["indices"]) else None


def _indexed(s: Step) -> int | None:
    """By places for all or for each example, in a table or along other dimensions than the batch; or each at its own place."""
    x, indices = s.named["self"], s.named["indices"]
    others = {n: at for n, at in s.read.items() if n is not x}
    along = indices[s.read[x].dim : s.read[x].dim + 1] if x in s.read else []
    own = [n for n in indices if n in s.own]
    if x in s.own or own != [n for n in along if n in s.own]:
        return None
    if x in s.read and along in ([], [None]):
        return s.lead() if not others else None
    # an example's place in the batch is none in a fold
    if x in s.read and (along[0] not in s.own or s.read[x].fold > 1):
        return None
    behind = {value(n).dim() - at.dim for n, at in others.items()}
    return s.lead() if len(behind) == 1 else None


def _multiplied(s: Step) -> int | None:
    """A matrix for all, where one of its dimensions in the result is the batch; or one for each example."""
    return s.lead() if len(s.read) == 1 else s.lead_aligned(behind=2)


def _added_product(s: Step) -> int | None:
    added = s.named["self"]
    if added not in s.read:
        return _multiplied(s)
    factors = {n: at for n, at in s.read.items() if n is not added}
    lead = replace(s, read={added: s.read[added]}).lead_aligned()
    return lead if not factors or _multiplied(replace(s, read=factors)) == lead else None


def _summed_products(s: Step) -> int | None:
    """Einsum with one letter for the batch, which the result has."""
    operands = s.named["tensors"]
    terms, result = written_out(s.named["equation"], [value(n).dim() for n in operands])
    pairs = [*zip(terms, operands, strict=True)]
    batch = result[s.dim]
    others = all(batch not in term for term, n in pairs if n not in s.read)
    each = all(term[s.read[n].dim] == batch and term.count(batch) == 1 for term, n in pairs if n in s.read)
    return s.lead() if each and others and result.count(batch) == 1 else None


def _attended(s: Step) -> int | None:
    return s.lead_aligned(behind=2)


def _on_last(dims: int) -> Rule:
    """On so many of the last dimensions of the first operand, with weights for all."""
    return lambda s: s.lead_if(lambda v, at: at.dim < v.dim() - dims) if s.reads_only_its_first() else None


def _padded(s: Step) -> int | None:
    return _on_last(len(s.named["pad"]) // 2)(s)


def _normalised(s: Step) -> int | None:
    return _along(s) if s.reads_only_its_first() else None


def _normalised_by_statistics(s: Step) -> int | None:
    _, at = s.first
    return s.lead() if s.reads_only_its_first() and not s.named["training"] and at.dim != 1 else None


def _on_batches(s: Step) -> int | None:
    """On (b, channels, ...), each for itself."""
    return s.lead_if(lambda v, at: at.dim == 0) if s.reads_only_its_first() else None


def _loss(s: Step) -> int | None:
    return s.lead_if(lambda v, at: at.dim == 0) if s.named.get("reduction") == 0 else None


def _apart(s: Step) -> int | None:
    """Vectors apart from one another: along the last dimension."""
    operand, _ = s.first
    return s.lead_beside({operand.dim() - 1})


_SIZED = names("""
    view reshape flatten unflatten _unsafe_view unsqueeze squeeze view_as reshape_as expand expand_as repeat slice
""")
_SAME = names(
    "view reshape unsqueeze squeeze flatten slice expand permute transpose clone contiguous detach alias to"
)
_COPIED = names("expand expand_as repeat")
_FILLED = names("""
    zeros ones full empty rand randn new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like rand_like
    randn_like
""")
_BY_RULE: dict[Rule, str] = {
    # not all of them tagged so
    _aligned: """
        expand expand_as repeat broadcast_tensors copy fill zero masked_fill where nan_to_num isfinite isnan isinf softplus gelu
        mish silu relu relu6 leaky_relu elu celu selu hardtanh hardswish logsigmoid log_sigmoid square prelu type_as to _to_copy
        __and__ __or__ __xor__ dropout alpha_dropout native_dropout bernoulli rrelu rrelu_with_noise uniform normal exponential
    """,
    _same: """
        clone detach alias contiguous lift_fresh lift_fresh_copy one_hot permute transpose movedim swapaxes t mT adjoint numpy_T
        real imag view_as_real view_as_complex conj conj_physical
    """,
    _reshaped: "view reshape flatten unflatten _unsafe_view unsqueeze squeeze view_as reshape_as",
    _each_repeated: "repeat_interleave",
    _along: """
        sum mean amax amin prod var std norm linalg_vector_norm logsumexp max min argmax argmin all any cosine_similarity var_mean
        std_mean nansum nanmean count_nonzero select narrow split split_with_sizes chunk unbind cat glu linalg_cross triu tril
        diagonal
    """,
    _stacked: "stack",
    _sliced: "slice",
    _picked: "gather scatter scatter_add scatter_reduce",
    _selected: "index_select",
    _looked_up: "embedding",
    _indexed: "index",
    _multiplied: "linear mm matmul bmm cdist",
    _added_product: "addmm baddbmm",
    _summed_products: "einsum",
    _attended: "scaled_dot_product_attention",
    _padded: "pad constant_pad_nd",
    _on_last(3): "pixel_shuffle pixel_unshuffle",
    _normalised_by_statistics: "batch_norm",
    _on_batches: "instance_norm feature_dropout channel_shuffle im2col",
    _loss: """
        cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
        binary_cross_entropy_with_logits poisson_nll_loss kl_div hinge_embedding_loss soft_margin_loss cosine_embedding_loss
        margin_ranking_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss
    """,
    _apart: "pairwise_distance",
}
_RULES = (
    {name: rule for rule, text in _BY_RULE.items() for name in names(text)}
    | dict.fromkeys(SCANS, _along)
    | dict.fromkeys(SLICES, _normalised)
)
