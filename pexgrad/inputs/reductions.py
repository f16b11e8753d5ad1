"""A loss that gives one number, computed for all examples of a batch at once.

By the definition such a loss is called for each example by itself: `(output - y).square().mean()` on a batch of one. Here it
is called once, on the whole batch, in a mode that gives each example its own number wherever a tensor of examples is
reduced to one. What comes after such a reduction is arithmetic on numbers, for all examples alike.

It is used where that gives what the definition gives, on a few examples and for any batch size (see `loss_graph.py`); a loss that
does anything else with its numbers is called for each example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Reduce = Callable[..., Tensor | None]  # (function, its settings, input, target) -> (b,)


class NotPerExample(Exception):
    """The loss is not made of reductions and arithmetic on what they give."""


def _every(*names: str) -> frozenset[Any]:
    own = (getattr(where, n, None) for n in names for where in (torch, Tensor))
    operators = (getattr(Tensor, f"__{kind}{n}__", None) for n in names for kind in ("", "r", "i"))
    return frozenset({*own, *operators} - {None})


CLASSES = (F.cross_entropy, F.nll_loss)
_REDUCTIONS = {"mean": _every("mean"), "sum": _every("sum")}
_ARITHMETIC = _every(
    "add", "sub", "mul", "div", "truediv", "true_divide", "neg", "pow", "exp", "log", "sqrt", "square", "abs", "clamp", "relu",
    "log1p", "expm1", "sigmoid", "tanh", "softplus", "float", "double", "to",
)  # fmt: skip


# of a tensor, which are the same of each number
_PLAIN = frozenset({"dtype", "device", "layout", "requires_grad", "is_cuda", "is_leaf", "grad_fn"})


class OverExamples(TorchFunctionMode):
    """Reductions of what belongs to examples give (b,), a number for each."""

    def __init__(self, batch: Any, tensors: Iterable[Tensor], losses: dict[Any, Reduce]):
        super().__init__()
        self._batch, self._losses = batch, losses
        # by identity, and kept alive, so that none takes another's
        self._of_examples = {id(t): t for t in tensors}
        self._numbers: dict[int, Tensor] = {}
        self.steps: list[Any] = []  # the functions called so far

    def are_numbers(self, result: Any) -> bool:
        """Whether a result is one number for each example."""
        return id(result) in self._numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.steps.append(func)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(id(t) in self._numbers for t in given):
            if func in _ARITHMETIC and all(id(t) in self._numbers or not t.dim() for t in given):
                return self._noted(func(*args, **kwargs), self._numbers)
            # a dtype, say; a shape, as another function, is not that of one number
            if getattr(getattr(func, "__self__", None), "__name__", None) in _PLAIN:
                return func(*args, **kwargs)
            raise NotPerExample
        if not any(id(t) in self._of_examples for t in given):
            return func(*args, **kwargs)
        reduced = self._reduced(func, args, kwargs)
        if reduced is not None:
            return self._noted(reduced, self._numbers)
        result = func(*args, **kwargs)
        if any(isinstance(t, Tensor) and not t.dim() for t in pytree.tree_leaves(result)):
            raise NotPerExample  # reduced in another way
        return self._noted(result, self._of_examples)

    def _noted(self, result: Any, among: dict[int, Tensor]) -> Any:
        among |= {id(t): t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)}
        return result

    def _reduced(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        for name, functions in _REDUCTIONS.items():
            if func in functions and len(args) == 1 and not kwargs:
                return getattr(self._apart(args[0]).flatten(1), name)(1)
        if func not in self._losses:
            return None
        settings = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
        if settings.get("reduction") == "none":
            return None
        x, y = settings.pop("input"), settings.pop("target")
        if self._positions(x) != 1:
            if settings.get("reduction") == "batchmean":  # by the positions of one example
                raise NotPerExample
            x, y = self._apart(x), self._apart(y)
            if func in CLASSES:  # (b, t, c) -> (b, c, t)
                x, y = x.movedim(2, 1), y.movedim(2, 1) if y.dim() == x.dim() else y
        reduced = self._losses[func](func, settings, x, y)
        if reduced is None:
            raise NotPerExample
        return reduced

    def _positions(self, x: Any) -> Any:
        """How many positions of one example there are along dimension 0."""
        if not isinstance(x, Tensor) or not x.dim() or id(x) not in self._of_examples:
            raise NotPerExample
        return x.shape[0] // self._batch

    def _apart(self, x: Any) -> Tensor:
        """(b, t, ...) from (b * t, ...)."""
        return x.unflatten(0, (self._batch, self._positions(x)))
