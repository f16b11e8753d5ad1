"""The loss of each example.

The definition is `loss(model(x_b), y_b).sum()` on a batch of one. A loss that returns one value or more per
example is used as it is; a scalar one is evaluated on each example's slice of the output, except for
the losses of torch.nn and torch.nn.functional given directly, whose reduction is done per example instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from ..base import trees
from ..base.compare import TIMES, largest_error, moved
from ..base.history import is_through_custom, read_from
from ..base.modes import validated
from ..base.numerics import is_inexact
from ..errors import LossError, MixedExamplesError
from .call import Call
from .reductions import NotPerExample, OverExamples, Sizes
from .steps import Step, common
from .torch_losses import Loss, vectorised

Examples = Callable[[int], tuple[Any, Any]]  # b -> the output and y of example b as a batch of one
Mode = AbstractContextManager[Any]
_NO_MODE = contextlib.nullcontext()


class ExampleLosses:
    """`loss` as a function from the output of a batch to (B,) losses, one per example."""

    def __init__(self, loss: Loss):
        self.loss = loss
        self.vectorised = vectorised(loss)

    def together(self, output: Any, y: Any, batch: int, examples: Examples, calls: Mode) -> Tensor | None:
        """(b,) where it gives each example of a batch, of at least two, a number; None where it takes single ones.

        It is called, here and in `of_batch`, in the mode `calls`.
        """
        try:
            value = self._value(output, y, calls)
        except Exception:  # noqa: BLE001 - it may be written for one example; then this raises the user's error
            self._value(*examples(0))
            return None
        self._check_tensor(value)
        return self._of_examples(value, batch) if value.dim() else None

    def reduces(
        self, output: Callable[[], Any], y: Any, batch: int, examples: Examples, sizes: Sizes
    ) -> list[list[Step]] | Literal[False] | None:
        """The steps by which reductions give each example its own number, with and without checks; False where they do not.

        None where the loss takes no such output, or tells no examples apart by it.
        """
        try:
            alone = self.of_each(examples, batch).detach()
        except Exception:  # noqa: BLE001 - numbers that are no probabilities, say
            return None
        numbers = alone[alone.isfinite()]  # an example whose targets are all ignored has none
        if len(numbers) < 2 or bool((numbers - numbers[0]).abs().max() <= 1e-4 * numbers.abs().max()):
            return None
        ways = []
        for checks in (contextlib.nullcontext(), validated()):  # as now, and as in the calls to come
            with contextlib.suppress(Exception), checks:  # whatever it is, the definition does without
                together, mode = self.of_reductions(output(), y, batch, sizes)
                _, single = self.of_reductions(*examples(0), 1, sizes)
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
        y, given = _copied(y), [t.grad_fn for t in trees.tensors(output)]
        mode = OverExamples(batch, trees.tensors((output, y)), sizes, noting)
        with mode:
            value = self.loss(output, y)
        if not mode.are_numbers(value) or not value.is_floating_point():
            raise NotPerExample
        # the code of a custom function has had numbers of all examples in the place of one, and so would its backward
        if is_through_custom(value, given):
            raise NotPerExample
        return value, mode

    def refuse_mixing(self, together: Tensor, examples: Examples, first: int) -> None:
        """Raise where the losses (B,) of a batch are not those of the first examples by themselves."""
        alone = self.of_each(examples, first)
        together = together[:first]
        for b, (got, want) in enumerate(zip(together.detach(), alone.detach(), strict=True)):
            if largest_error({"": got}, {"": want}) is not None and not self._rounds_by(
                got - want, *examples(b)
            ):
                raise MixedExamplesError(
                    f"{_name(self.loss)} gives example {b} of a batch {float(got):.4g}, and the same example alone "
                    f"{float(want):.4g}: it depends on the other examples, or on how many there are. Return the losses of each "
                    "example before anything is averaged or divided over the batch"
                )

    def _rounds_by(self, difference: Tensor, output: Any, y: Any) -> bool:
        """Whether an example's loss changes by so much where its output is rounded otherwise; near zero that is all of it."""
        losses = [
            self._scalar(self._value(trees.map_tensors(functools.partial(_rounded, steps=n), output), y))
            for n in (0, 1, -2, 4)
        ]
        by_rounding = torch.stack([loss - losses[0] for loss in losses]).abs().max()
        return bool(difference.abs() <= TIMES * by_rounding)

    def of_batch(self, output: Any, y: Any, batch: int, calls: Mode = _NO_MODE) -> Tensor:
        """(b,): a loss that takes batches, summed over what is not the batch."""
        value = self._value(output, y, calls)
        self._check_tensor(value)
        return self._of_examples(value, batch)

    def _value(self, output: Any, y: Any, mode: Mode = _NO_MODE) -> Any:
        """What the user's function gives; it may write into y, of which it gets a copy."""
        y = _copied(y)
        with mode:
            return self.loss(output, y)

    def of_each(self, examples: Examples, batch: int) -> Tensor:
        """(b,): the definition, one example after the other."""
        return torch.stack([self._scalar(self._value(*examples(b))) for b in range(batch)])

    def _of_examples(self, value: Tensor, batch: int) -> Tensor:
        if type(batch) is int and batch == 1:  # of which a loss that squeezes gives a number
            return self._scalar(value).reshape(1)
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


def refuse_other_ways(losses: Tensor, at: Call, outputs: Iterable[Any] = ()) -> None:
    """Raise where losses depend on the module's own parameters, not only on those that it is called with.

    `outputs` are autograd's nodes of what the model has computed of these.
    """
    own = {k: p for k, p in at.module.parameters.items() if k in set(at.trainable)}
    # what a call is given may itself be made of them, where its result is to be differentiated
    if own and (read := read_from(losses, own, until=[*outputs, *(t.grad_fn for t in at.flat())])):
        raise LossError(
            f"the loss reads {', '.join(map(repr, read))} from the model itself, past the parameters that the function "
            "is called with, so that part of the gradient would be missing; let the model return what the loss needs of them"
        )


def _copied(y: Any) -> Any:
    """`y` in memory of its own; a tensor of a class that a copy is not of is itself given."""

    def copied(t: Tensor) -> Tensor:
        copy = t.clone()
        return copy if type(copy) is type(t) else t

    return trees.map_tensors(copied, y)


def _rounded(t: Tensor, steps: int) -> Tensor:
    """`t` with its numbers changed by so many roundings."""
    return moved(t, steps * torch.finfo(t.dtype).eps) if is_inexact(t) else t.clone()


def _name(loss: Any) -> str:
    return f"the loss {getattr(loss, '__name__', type(loss).__name__)}"
