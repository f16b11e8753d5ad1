"""The transform that gives a clipped sum, with or without a mask that says which examples count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..inputs.arguments import Options, Params
from ..inputs.call import Call
from ..losses.torch_losses import Loss
from ..operator.clipping import Clipping
from ..operator.jacobian import Jacobian
from ..pipeline import Pipeline
from .compose import composable
from .results import NUMBERS, SUMS, Clipped, Part
from .transform import Model, Transform


class ClippedGrad(Transform):
    """`(params, x, y=None, *, mask=None) -> Clipped`; made by `clipped_grad`."""

    def __init__(self, model: Model, loss: Loss, options: Options, clipping: Clipping):
        how = clipping.how
        super().__init__(model, loss, options, beside=[how] if callable(how) else [])
        self._clipping = clipping

    @property
    def sensitivity(self) -> float | None:
        """The largest norm that one example can add to the sum; None where a function gives the weights."""
        return self._clipping.sensitivity

    @composable
    def __call__(self, params: Params, x: Any, y: Any = None, *, mask: Tensor | None = None) -> Clipped:
        call = self._check(params, x, y)
        if mask is None:
            if callable(self._clipping.how):  # it may do more than a recording of it, such as keep the norms
                return self._run(call)
            return self._repeated(call, lambda known: self._run(call, known))
        part = self._run(call.chosen(mask))
        return Clipped(part.grads, _spread(part.norms, mask), _spread(part.losses, mask))

    def _run(self, call: Call, pipeline: Pipeline | None = None) -> Clipped:
        if not call.batch:  # which a function for the weights need not take
            return Clipped(call.zeros(), call.no_numbers(), call.no_numbers())
        return super()._run(call, pipeline)

    def _check_mask(self, call: Call, mask: Tensor) -> None:
        super()._check_mask(call, mask)
        if callable(self._clipping.how):
            raise InputError(
                "clipped_grad takes no mask= inside a torch.func transform where clip is a function: it would see norms of "
                'examples that do not count; use clip="flat", "per_parameter" or "automatic"'
            )

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Clipped:
        jacobian = jacobian.keep()  # replaced, so that what the kept rows were made of is freed
        weights, norms = self._clipping.weights(jacobian)
        if not further:
            return Clipped(jacobian.vjp(weights), norms, jacobian.losses)
        (mask,) = further  # the examples that it leaves out are copies of one that counts, if there is one

        def only(w: Tensor) -> Tensor:
            return torch.where(mask, w, 0)

        weights = {k: only(w) for k, w in weights.items()} if isinstance(weights, dict) else only(weights)
        grads = {k: torch.where(mask.any(), g, 0) for k, g in jacobian.vjp(weights).items()}
        return Clipped(grads, only(norms), only(jacobian.losses))

    def _parts(self) -> tuple[Part, ...]:
        return SUMS, NUMBERS, NUMBERS

    def _of_parts(self, *parts: Any) -> Clipped:
        return Clipped(*parts)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """(B,): the values at the places of the examples that count, zero elsewhere."""
    return values.new_zeros(mask.shape[0]).masked_scatter(mask.to(values.device), values)
