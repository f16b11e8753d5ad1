"""The transforms that give rows, norms or the Jacobian itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..inputs.arguments import Options, Params, check_out
from ..inputs.call import Call
from ..losses.torch_losses import Loss
from ..operator.jacobian import Jacobian
from ..pipeline import Pipeline
from .compose import composable
from .results import NUMBERS, NUMBERS_BY_NAME, ROWS, Part
from .transform import Model, Transform


class PerExampleGrad(Transform):
    """`(params, x, y=None, *, out=None) -> {name: (B, *shape)}`; made by `per_example_grad`."""

    @composable
    def __call__(
        self, params: Params, x: Any, y: Any = None, *, out: Mapping[str, Tensor] | None = None
    ) -> Any:
        call = self._check(params, x, y)
        buffers = None if out is None else check_out(out, call, self._options.create_graph)
        return self._repeated(call, lambda known: self._into(buffers, call, known), buffers)

    def _into(self, buffers: dict[str, Tensor] | None, call: Call, pipeline: Pipeline | None) -> Any:
        """The result, with the rows written into memory where that is given."""
        if buffers is None and self._chunk_size(call) < call.batch and not self._options.create_graph:
            # each chunk goes to its place: joined at the end, all rows would be there twice
            buffers = call.room()
        if buffers is None:
            return self._run(call, pipeline)

        def fill(place: dict[str, Tensor], part: Call) -> Tensor:
            jacobian = self._jacobian(part, pipeline)
            jacobian.rows(place, last=True)
            return jacobian.losses

        losses = [fill({k: b[s] for k, b in buffers.items()}, part) for s, part in self._chunks(call)]
        return self._result(torch.cat(losses), buffers)

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Any:
        return self._result(jacobian.losses, jacobian.rows(last=True))

    def _result(self, losses: Tensor, rows: dict[str, Tensor]) -> Any:
        return rows

    def _parts(self) -> tuple[Part, ...]:
        return (ROWS,)


class PerExampleValueAndGrad(PerExampleGrad):
    """`(params, x, y=None, *, out=None) -> (losses (B,), {name: (B, *shape)})`; made by `per_example_value_and_grad`."""

    def _result(self, losses: Tensor, rows: dict[str, Tensor]) -> Any:
        return losses, rows

    def _parts(self) -> tuple[Part, ...]:
        return NUMBERS, ROWS


class PerExampleGradNorm(Transform):
    """`(params, x, y=None) -> (B,)`, or `{name: (B,)}`; made by `per_example_grad_norm`."""

    def __init__(self, model: Model, loss: Loss, options: Options, per_param: bool):
        super().__init__(model, loss, options)
        self._per_param = per_param

    @composable
    def __call__(self, params: Params, x: Any, y: Any = None) -> Any:
        call = self._check(params, x, y)
        return self._repeated(call, lambda known: self._run(call, known))

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Any:
        return jacobian.norms(self._per_param)

    def _parts(self) -> tuple[Part, ...]:
        return (NUMBERS_BY_NAME if self._per_param else NUMBERS,)


class PerExampleJacobian(Transform):
    """`(params, x, y=None) -> Jacobian`; made by `per_example_jacobian`."""

    @composable
    def __call__(self, params: Params, x: Any, y: Any = None) -> Jacobian:
        call = self._check(params, x, y)
        if not call.batch:
            return self._jacobian(call)
        pipeline = self._pipeline_or_none(call)
        constants = [] if pipeline is None else pipeline.trace.constants()
        return self._jacobian_by(pipeline, call).watching(call, constants)
