"""The loss of each example.

The definition is `loss(model(x_b), y_b).sum()` on a batch of one. A loss that returns one value or more per
example is used as it is; a scalar one is evaluated on each example's slice of the output, except for
the losses of torch.nn and torch.nn.functional given directly, whose reduction is done per example instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import trees
from ..base.compare import TIMES, largest_error, moved
from ..base.modes import validated
from ..base.numerics import is_inexact
from ..errors import LossError, MixedExamplesError
from .reductions import NotPerExample, OverExamples, Sizes, Step, common

Loss = Callable[[Any, Any], Tensor]
Slices = Callable[[int], Any]  # b -> the output of example b as a batch of one
PerExample = Callable[[Any, Any], Tensor | None]  # None: these shapes need the definition
Mode = AbstractContextManager[Any]
_NO_MODE = contextlib.nullcontext()

# losses whose reduction="none" is elementwise in output and target of one shape
_ELEMENTWISE = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
}
# losses over classes, whose mean is weighted by the targets' classes
_CLASSES = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}


def vectorised(loss: Loss) -> PerExample | None:
    """The per-example form of a loss of torch given directly, or of a partial of one; None for any other.

    Its settings are read at each call.
    """
    function = loss.func if isinstance(loss, functools.partial) and not loss.args else _function_of(loss)
    form = _PER_EXAMPLE.get(function)
    return None if form is None else functools.partial(_at_settings, form, function, loss)


def _at_settings(form: Any, function: Any, loss: Loss, output: Any, y: Any) -> Tensor | None:
    settings = _settings(loss)
    return None if settings is None else form(function, settings, output, y)


def _function_of(loss: Loss) -> Any:
    """The function behind a loss module of torch's."""
    return _FUNCTIONS.get(type(loss), loss)


_FUNCTIONS = {module_type: function for function, module_type in (_ELEMENTWISE | _CLASSES).items()}


def _settings(loss: Loss) -> dict[str, Any] | None:
    """What a loss of torch's is called with beside output and target; None where it does more than its function."""
    if isinstance(loss, functools.partial):
        return dict(loss.keywords)
    if not isinstance(loss, nn.Module):
        return {}
    if "forward" in vars(loss) or loss._forward_hooks or loss._forward_pre_hooks:
        return None
    return {k: getattr(loss, k) for k in _names_of_settings(type(loss))}


@functools.cache
def _names_of_settings(module_type: type[nn.Module]) -> list[str]:
    given, held = inspect.signature(_FUNCTIONS[module_type]).parameters, module_type()
    return [k for k in given if hasattr(held, k) and k not in ("input", "target")]


def _reduction(function: Any, settings: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The reduction and the other settings; None where deprecated settings decide it, or there is no such reduction."""
    rest = dict(settings)
    if rest.pop("size_average", None) is not None or rest.pop("reduce", None) is not None:
        return None
    how = rest.pop("reduction", "mean")
    if how == "batchmean" and function is F.kl_div:
        how = "sum"  # over the one example
    return (how, rest) if how in ("mean", "sum", "none") else None


def _elementwise(function: Any, settings: dict[str, Any], output: Any, y: Any) -> Tensor | None:
    reduction = _reduction(function, settings)
    if reduction is None or not isinstance(output, Tensor) or not isinstance(y, Tensor):
        return None
    how, rest = reduction
    # a target of another shape is broadcast: against a batch, perhaps along the batch; and so may a weight be
    weights = (rest.get("weight"), rest.get("pos_weight"))
    if output.shape != y.shape or any(w is not None and w.dim() >= output.dim() for w in weights):
        return None
    each = function(output, y, reduction="none", **rest).reshape(output.shape[0], -1)
    return each.mean(1) if how == "mean" else each.sum(1)


def _classes(function: Any, settings: dict[str, Any], output: Any, y: Any) -> Tensor | None:
    reduction = _reduction(function, settings)
    if reduction is None or not isinstance(output, Tensor) or not isinstance(y, Tensor) or output.dim() < 2:
        return None
    how, rest = reduction
    if y.shape[:1] != output.shape[:1]:
        return None
    each = function(output, y, reduction="none", **rest)
    if how == "mean" and each.shape == y.shape == output.shape[:1] and rest.get("weight") is None:
        return each.masked_fill(y == rest.get("ignore_index", -100), float("nan"))  # the mean of none
    each = each.reshape(output.shape[0], -1)  # (b, positions)
    if how != "mean":
        return each.sum(1)
    if y.is_floating_point():  # class probabilities: a plain mean over positions
        return each.mean(1)
    return each.sum(1) / _class_weights(y, output, rest).sum(1)


def _class_weights(y: Tensor, output: Tensor, settings: dict[str, Any]) -> Tensor:
    """(b, positions): the weight of each target in the mean; zero where it is ignored."""
    labels = y.reshape(output.shape[0], -1)
    counted = labels != settings.get("ignore_index", -100)
    weight = settings.get("weight")
    if weight is None:
        return counted.to(output.dtype)
    return weight[labels.where(counted, 0).long()] * counted  # a mask is what uint8 would be


_PER_EXAMPLE = dict.fromkeys(_ELEMENTWISE, _elementwise) | dict.fromkeys(_CLASSES, _classes)


class ExampleLosses:
    """`loss` as a function from the output of a batch to (B,) losses, one per example."""

    def __init__(self, loss: Loss):
        self.loss = loss
        self.vectorised = vectorised(loss)

    def together(self, output: Any, slices: Slices, y: Any, batch: int, calls: Mode) -> Tensor | None:
        """(b,) where it gives each example of a batch, of at least two, a number; None where it takes single ones.

        It is called, here and in `of_batch`, in the mode `calls`.
        """
        try:
            with calls:
                value = self.loss(output, y)
        except Exception:  # noqa: BLE001 - it may be written for one example; then this raises the user's error
            self.loss(slices(0), trees.examples(y, 0, 1))
            return None
        self._check_tensor(value)
        return self._of_examples(value, batch) if value.dim() else None

    def reduces(
        self, output: Callable[[], Any], slices: Slices, y: Any, batch: int, sizes: Sizes
    ) -> list[list[Step]] | Literal[False] | None:
        """The steps by which reductions give each example its own number, with and without checks; False where they do not.

        None where the loss takes no such output, or tells no examples apart by it.
        """
        try:
            alone = self.of_slices(slices, y, batch).detach()
        except Exception:  # noqa: BLE001 - numbers that are no probabilities, say
            return None
        numbers = alone[alone.isfinite()]  # an example whose targets are all ignored has none
        if len(numbers) < 2 or bool((numbers - numbers[0]).abs().max() <= 1e-4 * numbers.abs().max()):
            return None
        ways = []
        for checks in (contextlib.nullcontext(), validated()):  # as now, and as in the calls to come
            with contextlib.suppress(Exception), checks:  # whatever it is, the definition does without
                together, mode = self.of_reductions(output(), y, batch, sizes)
                _, single = self.of_reductions(slices(0), trees.examples(y, 0, 1), 1, sizes)
                way = common(mode.steps, single.steps)
                same = way is not None and mode.coefficients == single.coefficients
                if not same or largest_error({"": together.detach()}, {"": alone}) is not None:
                    return False
                ways.append(way)
        return ways or False

    def of_reductions(
        self, output: Any, y: Any, batch: Any, sizes: Sizes, *, noting: bool = False
    ) -> tuple[Tensor, OverExamples]:
        """(b,): a loss that gives one number, its reductions taken for each example; and what it did.

        Sizes of the batch in its arithmetic are those of `sizes`, or are noted there.

        Raises:
            NotPerExample: where the loss does anything else.
        """
        mode = OverExamples(batch, trees.tensors((output, y)), _PER_EXAMPLE, sizes, noting)
        with mode:
            value = self.loss(output, y)
        if not mode.are_numbers(value) or not value.is_floating_point():
            raise NotPerExample
        return value, mode

    def refuse_mixing(self, together: Tensor, slices: Slices, y: Any, first: int) -> None:
        """Raise where the losses (B,) of a batch are not those of the first examples by themselves."""
        alone = self.of_slices(slices, y, first)
        together = together[:first]
        for b, (got, want) in enumerate(zip(together.detach(), alone.detach(), strict=True)):
            if largest_error({"": got}, {"": want}) is not None and not self._rounds_by(
                got - want, slices, y, b
            ):
                raise MixedExamplesError(
                    f"{_name(self.loss)} gives example {b} of a batch {float(got):.4g}, and the same example alone "
                    f"{float(want):.4g}: it depends on the other examples, or on how many there are. Return the losses of each "
                    "example before anything is averaged or divided over the batch"
                )

    def _rounds_by(self, difference: Tensor, slices: Slices, y: Any, b: int) -> bool:
        """Whether an example's loss changes by so much where its output is rounded otherwise; near zero that is all of it."""
        alone = trees.examples(y, b, b + 1)
        losses = [
            self._scalar(self.loss(trees.map_tensors(functools.partial(_rounded, steps=n), slices(b)), alone))
            for n in (0, 1, -2, 4)
        ]
        by_rounding = torch.stack([loss - losses[0] for loss in losses]).abs().max()
        return bool(difference.abs() <= TIMES * by_rounding)

    def of_batch(self, output: Any, y: Any, batch: int, calls: Mode = _NO_MODE) -> Tensor:
        """(b,): a loss that takes batches, summed over what is not the batch."""
        with calls:
            value = self.loss(output, y)
        self._check_tensor(value)
        return self._of_examples(value, batch)

    def of_slices(self, slices: Slices, y: Any, batch: int) -> Tensor:
        """(b,): the definition, one example after the other."""
        return torch.stack(
            [self._scalar(self.loss(slices(b), trees.examples(y, b, b + 1))) for b in range(batch)]
        )

    def _of_examples(self, value: Tensor, batch: int) -> Tensor:
        if value.dim() == 0 or value.shape[0] != batch:
            raise LossError(
                f"{_name(self.loss)} returned shape {tuple(value.shape)} for a batch of {batch}; return one number, "
                f"or ({batch}, ...) with the losses of each example"
            )
        return value.flatten(1).sum(1) if value.dim() > 1 else value

    def _scalar(self, value: Any) -> Tensor:
        self._check_tensor(value)
        if value.dim() > 0 and value.shape[0] > 1:
            raise LossError(
                f"{_name(self.loss)} returned shape {tuple(value.shape)} for a single example; return one number, or (1, ...)"
            )
        return value.sum()

    def _check_tensor(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            getattr(value, "refuse", lambda: None)()  # a part of the output that the trace does not carry
            raise LossError(f"{_name(self.loss)} returned {type(value).__name__}, not a tensor")
        if not value.is_floating_point():
            raise LossError(
                f"{_name(self.loss)} returned {value.dtype}; a loss must be real and floating-point"
            )


def _rounded(t: Tensor, steps: int) -> Tensor:
    """`t` with its numbers changed by so many roundings."""
    return moved(t, steps * torch.finfo(t.dtype).eps) if is_inexact(t) else t


def _name(loss: Any) -> str:
    return f"the loss {getattr(loss, '__name__', type(loss).__name__)}"
