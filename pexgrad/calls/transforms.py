"""The transforms: from a model to a pure function of its parameters, which traces once for each input signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base import trees
from ..base.fakes import TRACING
from ..base.modes import differentiable_kernels
from ..base.still import StandStill
from ..definition.remembered import refuse_remembered
from ..definition.strategies import LOOPS
from ..errors import InputError
from ..flat.lower import Lowered, lower_doubting
from ..inputs.arguments import Options, Params, check_call, check_out
from ..inputs.call import Call
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction
from ..losses.torch_losses import Loss
from ..operator.jacobian import Jacobian
from ..pipeline import Pipeline
from ..stages.layout import UntoldError
from .compose import Composable, composable
from .explain import Explanation, explain
from .repeats import may_repeat
from .results import NUMBERS, NUMBERS_BY_NAME, ROWS, Part, join

Model = nn.Module | Callable[..., Any]


class Transform(Composable):
    """What all transforms share: one trace for each input signature, and the Jacobian of a checked call."""

    def __init__(self, model: Model, loss: Loss, options: Options):
        if not callable(model):
            raise InputError(
                f"model must be an nn.Module or a function f(params, *inputs), not {type(model).__name__}"
            )
        if not callable(loss):
            raise InputError(f"loss must be a function loss(output, y), not {type(loss).__name__}")
        if isinstance(loss, type):
            raise InputError(f"loss is the class {loss.__name__}; pass an instance of it, {loss.__name__}()")
        self._model, self._loss, self._options = Bound(model), LossFunction(loss), options
        self._reset()

    def __repr__(self) -> str:
        model, loss = self._model.model, self._loss.loss
        return f"{type(self).__name__}({_name(model)}, loss={_name(loss)})"

    @property
    def trace_count(self) -> int:
        """How many times the model has been traced so far."""
        return sum(1 for _ in self._traces) + sum(t.trace_count for t in self._by_structure.values())

    @composable
    def explain(self, params: Params, x: Any, y: Any = None) -> Explanation:
        """The table of what a call with these arguments does, one line for each use of each parameter; its `lines` are objects.

        Its columns: the parameter, the operation and operand, the module, the rule, how rows and norms are computed, the bytes of
        the parameter's rows, flags, the line of code. The flags: `fallback` (there is no rule), `derived` (of what is computed
        from the parameter), `view` (of a part of it), `tied` (one of several uses), `unused` (its rows are zero), `frozen`.
        """
        call = self._check(params, x, y)
        pipeline = self._pipeline_or_none(call) if call.batch else None
        with StandStill():  # nothing is drawn for a table
            at = call.at_leaves(attached=self._options.create_graph)
            uses = [] if pipeline is None else pipeline.uses(at, self._options)
        return explain(pipeline, uses, self._loop, call)

    def _check(self, params: Params, x: Any, y: Any) -> Call:
        return check_call(self._model, params, x, y)

    def _jacobian(self, call: Call, pipeline: Pipeline | None = None) -> Jacobian:
        if not call.batch:
            return Jacobian.of_rows(call.no_numbers(), call.zeros(0))
        return self._jacobian_by(pipeline or self._pipeline_or_none(call), call)

    def _jacobian_by(self, pipeline: Pipeline | None, call: Call) -> Jacobian:
        o = self._options
        at = call.at_leaves(attached=o.create_graph)
        with differentiable_kernels(o.create_graph):
            if pipeline is None:
                refuse_remembered(self._model, self._loss.loss, call)
                return LOOPS[self._loop](self._model, self._loss, at, o.create_graph)
            try:
                return pipeline.jacobian(at, o)
            except UntoldError:  # a trace that is made with this call can tell
                return self._traces.anew(pipeline, call).jacobian(at, o)

    def _run(self, call: Call, pipeline: Pipeline | None = None) -> Any:
        """The result, from those of the chunks; the pipeline may be given for a call of one chunk."""
        return join(self._answer(self._jacobian(part, pipeline)) for _, part in self._chunks(call))

    def _chunks(self, call: Call) -> Iterator[tuple[slice, Call]]:
        size = self._chunk_size(call)
        for s in trees.runs(call.batch, size):
            yield s, call if size >= call.batch else call.examples(s.start, s.stop)

    def _chunk_size(self, call: Call) -> int:
        return self._options.chunk_size or max(1, call.batch)

    def _pipeline_or_none(self, call: Call) -> Pipeline | None:
        """None where a loop over the examples answers."""
        return self._traces.or_none(call) if self._options.strategy == "crb" else None

    @property
    def _loop(self) -> str:
        """The strategy of calls that have no pipeline."""
        return "naive" if self._options.strategy == "crb" else self._options.strategy

    def _repeated(
        self,
        call: Call,
        eagerly: Callable[[Pipeline | None], Any],
        out: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """What `eagerly(pipeline)` returns: where a small call is made often, from a graph of it; either writes rows into `out`.

        The pipeline is that of the whole call, where it has been looked up.
        """
        if not may_repeat(call, self._loss, self._options):
            return eagerly(None)
        with TRACING:
            self._graphs.notice_reads()
            pipeline = self._pipeline_or_none(call)
        if pipeline is None:
            return eagerly(None)

        def record() -> Lowered:
            with TRACING:
                return lower_doubting(pipeline, call, self._options, self._answer)

        return self._graphs.repeats.answer(pipeline, call, eagerly, record, out)


def _name(code: Callable[..., Any]) -> str:
    return getattr(code, "__name__", type(code).__name__)


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
        self._per_param = per_param
        super().__init__(model, loss, options)

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
