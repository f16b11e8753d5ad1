"""The loss of each example, by the user's own function.

The definition is `loss(model(x_b), y_b).sum()` on a batch of one: `of_each`. What a loss gives for a whole batch is taken for
that only where something else has shown that it is the same (`decide.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..base import trees
from ..base.history import read_from
from ..errors import LossError
from ..inputs.call import Call
from .torch_losses import Loss, vectorised

Examples = Callable[[int], tuple[Any, Any]]  # b -> the output and y of example b as a batch of one
Mode = AbstractContextManager[Any]
_NO_MODE = contextlib.nullcontext()


class LossFunction:
    """`loss(output, y)`, and what it gives for a batch or for single examples as (B,): one number for each."""

    def __init__(self, loss: Loss):
        self.loss = loss
        self.vectorised = vectorised(loss)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"the loss {getattr(self.loss, '__name__', type(self.loss).__name__)}"

    def of_each(self, examples: Examples, batch: int) -> Tensor:
        """(b,): the definition, one example after the other."""
        return torch.stack([self.of_one(*examples(b)) for b in range(batch)])

    def of_one(self, output: Any, y: Any) -> Tensor:
        """One number, for a batch of one example."""
        return self._number(self._value(output, y))

    def of_batch(self, output: Any, y: Any, batch: int, mode: Mode = _NO_MODE) -> Tensor:
        """(b,): a loss that takes batches, summed over what is not the batch; it is called in the mode."""
        value = self._value(output, y, mode)
        self._check_tensor(value)
        return self._numbers(value, batch)

    def of_batch_or_none(
        self, output: Any, y: Any, batch: int, examples: Examples, mode: Mode
    ) -> Tensor | None:
        """The same, for a batch of at least two; None where the loss returns one number, or takes single examples only."""
        try:
            value = self._value(output, y, mode)
        except Exception:  # noqa: BLE001 - it may be written for one example; then this raises the user's error
            self._value(*examples(0))
            return None
        self._check_tensor(value)
        return self._numbers(value, batch) if value.dim() else None

    def _value(self, output: Any, y: Any, mode: Mode = _NO_MODE) -> Any:
        """What the user's function gives; it may write into y, of which it gets a copy."""
        y = copied(y)
        with mode:
            return self.loss(output, y)

    def _numbers(self, value: Tensor, batch: int) -> Tensor:
        if type(batch) is int and batch == 1:  # of which a loss that squeezes gives a number
            return self._number(value).reshape(1)
        if value.dim() == 0 or value.shape[0] != batch:
            raise LossError(
                f"{self.name} returned shape {tuple(value.shape)} for a batch of {batch}; return one number, "
                f"or ({batch}, ...) with the losses of each example"
            )
        return value.flatten(1).sum(1) if value.dim() > 1 else value

    def _number(self, value: Any) -> Tensor:
        self._check_tensor(value)
        if value.dim() > 0 and value.shape[0] > 1:
            raise LossError(
                f"{self.name} returned shape {tuple(value.shape)} for a single example; return one number, or (1, ...)"
            )
        return value.sum()

    def _check_tensor(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            getattr(value, "refuse", lambda: None)()  # a part of the output that the trace does not carry
            raise LossError(f"{self.name} returned {type(value).__name__}, not a tensor")
        if not value.is_floating_point():
            raise LossError(f"{self.name} returned {value.dtype}; a loss must be real and floating-point")


def refuse_reading_parameters(losses: Tensor, at: Call, outputs: Iterable[Any] = ()) -> None:
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


def copied(y: Any) -> Any:
    """`y` in memory of its own; a tensor whose copy would be of another class is passed on as it is."""

    def own(t: Tensor) -> Tensor:
        copy = t.clone()
        return copy if type(copy) is type(t) else t

    return trees.map_tensors(own, y)
