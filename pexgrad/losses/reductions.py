"""A loss that gives one number, computed for all examples of a batch at once.

By the definition such a loss is called for each example by itself: `(output - y).square().mean()` on a batch of one. Here it
is called once, on the whole batch, in a mode that gives each example its own number wherever a tensor of examples is
reduced to one. What comes after such a reduction is arithmetic on numbers, for all examples alike, in which the size of the
batch is one.

It is used where that gives what the definition gives, on a few examples and for any batch size (see `reduced.py`); a loss that
does anything else with its numbers is called for each example.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..base.symbols import expression, symbol_of
from .steps import Step, Steps, leaves_of
from .torch_losses import CLASSES, PER_EXAMPLE, per_example, reduction_of

# of each arithmetic operation on numbers, by its place among them: argument -> what it is for a batch of so many, where it is
# made of the size of the batch
Sizes = dict[int, dict[int, Callable[[int], int]]]


class NotPerExample(Exception):
    """The loss is not made of reductions and arithmetic on what they give."""


def _every(*names: str) -> frozenset[Any]:
    own = (getattr(where, n, None) for n in names for where in (torch, Tensor, F))
    operators = (getattr(Tensor, f"__{kind}{n}__", None) for n in names for kind in ("", "r", "i"))
    return frozenset({*own, *operators} - {None})


# function -> the method that does the same along a dimension, equal maxima included
_NAMES = (
    "mean", "sum", "prod", "std", "var", "norm", "amax", "amin", "nanmean", "nansum", "count_nonzero", "logsumexp",
)  # fmt: skip
_REDUCTIONS = {f: n for n in _NAMES for f in _every(n)}
_REDUCTIONS |= dict.fromkeys(_every("max"), "amax") | dict.fromkeys(_every("min"), "amin")
_REDUCTIONS |= dict.fromkeys((torch.linalg.norm, torch.linalg.vector_norm), "norm")
_ALONG_A_DIMENSION = _every("mean", "sum", "prod", "amax", "amin", "nanmean", "nansum", "logsumexp")
_LARGER = _every("max", "min")  # of two numbers, as well as of all in a tensor
# what is made of others
_MADE_OF = {
    **dict.fromkeys(_every("dot"), lambda x, y: (x * y).sum()),
    **dict.fromkeys(_every("dist"), lambda x, y, p=2: (x - y).norm(p=p)),
}
# what torch's own code spells out when it calls a function of a tensor: as good as not given
_DEFAULTS = (
    ("p", "fro"),
    ("p", None),
    ("ord", None),
    ("dim", None),
    ("keepdim", False),
    ("dtype", None),
    ("out", None),
)
# of a tensor, which are the same of each number
_PLAIN = frozenset({"dtype", "device", "layout", "requires_grad", "is_cuda", "is_leaf", "grad_fn"})
# losses of several tensors, whose mean is that of what they give without a reduction
_OF_MANY = frozenset({
    F.cosine_embedding_loss, F.margin_ranking_loss, F.multi_margin_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
})  # fmt: skip
# number by number
_ARITHMETIC = _every(
    "add", "sub", "mul", "div", "truediv", "true_divide", "neg", "pow", "exp", "log", "sqrt", "square", "abs", "clamp", "relu",
    "log1p", "expm1", "sigmoid", "tanh", "softplus", "float", "double", "to", "log10", "log2", "exp2", "rsqrt", "reciprocal",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2", "hypot", "erf", "sign",
    "maximum", "minimum", "fmax", "fmin", "logaddexp", "clamp_min", "clamp_max", "floor", "ceil", "round", "nan_to_num", "where",
    "gt", "ge", "lt", "le", "eq", "ne", "detach", "clone", "silu", "gelu", "elu", "leaky_relu", "logsigmoid", "logit", "lgamma",
)  # fmt: skip


def _is_whole(args: Any, kwargs: Any) -> bool:
    """Whether a reduction is along a dimension, and there is no other."""
    of_vector = bool(args) and isinstance(args[0], Tensor) and args[0].dim() == 1
    settings = [*args[1:], *kwargs.values()]
    return of_vector and kwargs.keys() <= {"dim"} and [type(s) for s in settings] == [int]


def _of_size(argument: Any, batch: Any) -> Callable[[int], int] | None:
    """What a size becomes for another batch; None where it does not depend on that, or is no size."""
    if not isinstance(argument, torch.SymInt):
        return None
    expr, size = expression(argument), symbol_of(batch)
    return functools.cache(lambda n: int(expr.subs(size, n))) if size in expr.free_symbols else None


class OverExamples(TorchFunctionMode):
    """Reductions of what belongs to examples give (b,), a number for each."""

    def __init__(self, batch: Any, tensors: Iterable[Tensor], sizes: Sizes, noting: bool):
        super().__init__()
        self._batch = batch
        self._sizes, self._noting, self._operations = sizes, noting, 0
        # by identity, and kept alive, so that none takes another's
        self._of_examples = {id(t): t for t in tensors}
        self._numbers: dict[int, Tensor] = {}
        self._taken = Steps(self._of_examples.values())
        self.coefficients: list[Any] = []  # the numbers in the steps, but for sizes

    @property
    def steps(self) -> list[Step]:
        """What the loss has done so far."""
        return self._taken.steps

    def are_numbers(self, result: Any) -> bool:
        """Whether a result is one number for each example."""
        return id(result) in self._numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = leaves_of(args, kwargs)
        self._taken.note(func, leaves)
        result = self._call(func, args, kwargs, leaves)
        self._taken.meet(pytree.tree_leaves(result))
        return result

    def _call(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        # with which `torch.distributions` checks what it is given
        if func is torch._is_all_true:  # pyright: ignore[reportPrivateImportUsage]
            return func(*args, **kwargs)
        if any(isinstance(a, torch.SymFloat) for a in leaves):  # a coefficient made of the size of the batch
            raise NotPerExample
        self.coefficients += [a for a in leaves if isinstance(a, float)]
        given = [t for t in leaves if isinstance(t, Tensor)]
        if any(id(t) in self._numbers for t in given):
            return self._of_numbers(func, args, kwargs, given)
        if not any(id(t) in self._of_examples for t in given):
            return func(*args, **kwargs)
        if func in _MADE_OF:
            with self:
                return _MADE_OF[func](*args, **kwargs)
        reduced = self._reduced(func, args, kwargs)
        if reduced is not None:
            return self._noted(reduced, self._numbers)
        result = func(*args, **kwargs)
        single = type(self._batch) is int and self._batch == 1  # of which `squeeze` leaves a number
        if not single and any(isinstance(t, Tensor) and not t.dim() for t in pytree.tree_leaves(result)):
            raise NotPerExample  # reduced in another way
        return self._noted(result, self._of_examples)

    def _of_numbers(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """An operation with numbers among its operands, which are one for each example."""
        if func is torch.stack and len(args) == 1 and not kwargs and all(map(self.are_numbers, given)):
            return self._noted(torch.stack(args[0], 1), self._of_examples)  # (b, n), of each its vector
        # a dtype, say; a shape, as another function, is not that of one number
        if getattr(getattr(func, "__self__", None), "__name__", None) in _PLAIN:
            return func(*args, **kwargs)
        if func not in _ARITHMETIC and (func not in _LARGER or len(given) != 2):
            raise NotPerExample
        args = self._of_one(args)
        self.coefficients += [a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor)]
        with_vectors = [t for t in given if t.dim() and not self.are_numbers(t)]
        if with_vectors:
            if any(isinstance(v, Tensor) for v in kwargs.values()):
                raise NotPerExample
            args = [self._beside(a, with_vectors) for a in args]
        return self._noted(func(*args, **kwargs), self._of_examples if with_vectors else self._numbers)

    def _beside(self, argument: Any, vectors: list[Tensor]) -> Any:
        """(b, 1, ...) for numbers beside what has (b, ...) for each example."""
        if any(self._positions(t) != 1 or t.dim() != vectors[0].dim() for t in vectors):
            raise NotPerExample
        return argument.reshape(-1, *[1] * (vectors[0].dim() - 1)) if self.are_numbers(argument) else argument

    def _of_one(self, args: Any) -> Any:
        """An operation's arguments with sizes of the batch as those of a batch of one: `number / len(output)`."""
        place, self._operations = self._operations, self._operations + 1
        made = {i: of for i, a in enumerate(args) if (of := _of_size(a, self._batch)) is not None}
        if self._noting:
            self._sizes[place] = made
        sizes = self._sizes.get(place, {})
        if isinstance(self._batch, torch.SymInt):
            same = made.keys() == sizes.keys()
        else:
            same = all(type(args[i]) is int and args[i] == of(self._batch) for i, of in sizes.items())
        if not same:  # another number by now
            raise NotPerExample
        return [sizes[i](1) if i in sizes else a for i, a in enumerate(args)]

    def _noted(self, result: Any, among: dict[int, Tensor]) -> Any:
        among |= {id(t): t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}
        return result

    def _reduced(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        if func in _ALONG_A_DIMENSION and _is_whole(args, kwargs):
            args, kwargs = args[:1], {}
        if func in _REDUCTIONS and len(args) == 1:
            given = {k: v for k, v in kwargs.items() if (k, v) not in _DEFAULTS}
            if given.keys() <= {"p"}:  # of a norm
                return getattr(self._apart(args[0]).flatten(1), _REDUCTIONS[func])(dim=1, **given)
        if func not in PER_EXAMPLE and func not in _OF_MANY:
            return None
        settings = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
        if settings.get("reduction") == "none":
            return None
        if func in _OF_MANY:
            return self._mean_or_sum(func, settings)
        x, y = settings.pop("input"), settings.pop("target")
        if self._positions(x) != 1:
            if settings.get("reduction") == "batchmean":
                raise NotPerExample
            x, y = self._apart(x), self._apart(y)
            if func in CLASSES:  # (b, t, c) -> (b, c, t)
                x, y = x.movedim(2, 1), y.movedim(2, 1) if y.dim() == x.dim() else y
        reduced = per_example(func, settings, x, y)
        if reduced is None:
            raise NotPerExample
        return reduced

    def _mean_or_sum(self, func: Any, settings: dict[str, Any]) -> Tensor:
        if (found := reduction_of(func, settings)) is None:
            raise NotPerExample
        how, rest = found
        each = self._noted(func(**rest, reduction="none"), self._of_examples)
        return getattr(self._apart(each).flatten(1), how)(dim=1)

    def _positions(self, x: Any) -> Any:
        """How many positions of one example there are along dimension 0."""
        if not isinstance(x, Tensor) or id(x) not in self._of_examples:
            raise NotPerExample
        return x.shape[0] // self._batch if x.dim() else 1

    def _apart(self, x: Any) -> Tensor:
        """(b, t, ...) from (b * t, ...)."""
        positions = self._positions(x)
        return (x if x.dim() else x.reshape(1)).unflatten(0, (self._batch, positions))
