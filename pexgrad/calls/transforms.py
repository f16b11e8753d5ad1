"""The transforms: from a model to a pure function of its parameters, which traces once for each input signature."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..base import nested, trees
from ..base.fakes import TRACING
from ..base.modes import differentiable_kernels, uncompiled, unvalidated, users_modes
from ..base.still import StandStill
from ..definition.remembered import refuse_remembered
from ..definition.strategies import LOOPS
from ..definition.verify import refuse_mixing, verify
from ..errors import (
    ANY_MODEL,
    InputError,
    LossError,
    MixedExamplesError,
    PexgradError,
    TraceError,
    VerificationError,
)
from ..inputs.arguments import Options, Params, check_call, check_out
from ..inputs.call import Call, example_numbers
from ..inputs.generators import States
from ..inputs.loss import ExampleLosses
from ..inputs.reads import forget_names
from ..inputs.rebind import Bound, global_hooks, refuse_backward_hooks
from ..inputs.snapshot import held_by
from ..inputs.torch_losses import Loss
from ..operator.clipping import Clipping
from ..operator.jacobian import Jacobian
from ..pipeline import Pipeline, build
from ..stages.layout import UntoldError
from .compose import Composable, composable
from .explain import Explanation, explain
from .results import Clipped, join

Model = nn.Module | Callable[..., Any]

_TRACES_OF_A_KIND = 8  # from which on they are worth a warning


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
        self._model, self._loss, self._options = Bound(model), ExampleLosses(loss), options
        self._reset()

    @property
    def trace_count(self) -> int:
        """How many times the model has been traced so far."""
        return sum(map(len, self._pipelines.values())) + sum(
            t.trace_count for t in self._by_structure.values()
        )

    @composable
    def explain(self, params: Params, x: Any, y: Any = None) -> Explanation:
        """The table of what a call with these arguments does; nothing is kept of the gradients."""
        call = self._check(params, x, y)
        pipeline = self._pipeline_or_none(call) if call.batch else None
        with StandStill():  # nothing is drawn for a table
            at = call.at_leaves(attached=self._options.create_graph)
            uses = [] if pipeline is None else pipeline.uses(at, self._options)
        return explain(pipeline, uses, self._options.strategy, call)

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
                return LOOPS[o.strategy](self._model, self._loss, at, o.create_graph)
            try:
                return pipeline.jacobian(at, o)
            except UntoldError:  # this call can tell
                return self._traced_anew(pipeline, call).jacobian(at, o)

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
        """None for the loops, which trace nothing."""
        return self._pipeline(call) if self._options.strategy == "crb" else None

    def _pipeline(self, call: Call) -> Pipeline:
        key = self._signature(call)
        with TRACING:
            known = self._pipelines.setdefault(key, [])
            for pipeline in known:
                if pipeline.serves(call):
                    return pipeline
            refuse_backward_hooks(self._model.model)
            self._warn_of_changes(key)
            with uncompiled(), unvalidated():
                pipeline = self._build(call)
            known.insert(0, pipeline)  # it may take the place of one that no longer serves
            leaves = trees.flatten((trees.as_call(call.x), call.y))[0]
            others = [held for v in leaves if not isinstance(v, Tensor) for held in held_by(v)]
            others += [held for mode in users_modes() for held in (mode, *held_by(vars(mode)))]
            self._kept_alive.append(call.module.references + others)
            return pipeline

    def _traced_anew(self, pipeline: Pipeline, call: Call) -> Pipeline:
        with TRACING:
            known = self._pipelines[self._signature(call)]
            if pipeline in known:
                known.remove(pipeline)
            return self._pipeline(call)

    def _warn_of_changes(self, key: Any) -> None:
        """Warn where the same inputs have been traced again and again, for something else that has changed."""
        others = [k for k, known in self._pipelines.items() if known and k[1:] == key[1:]]
        if len(others) == _TRACES_OF_A_KIND:
            warnings.warn(
                f"{type(self).__name__} has been traced {len(others)} times for inputs of one kind, because something that the "
                "model holds or its code reads keeps changing (a counter, a setting). Each trace takes time and memory: pass "
                "what changes as an input, or keep it out of the model",
                stacklevel=2,
            )

    def _build(self, call: Call) -> Pipeline:
        forget_names()
        try:
            refuse_remembered(self._model, self._loss.loss, call)
            pipeline, sample = build(self._model, self._loss, call)
            if self._options.verify:
                refuse_mixing(pipeline)
                verify(pipeline, self._model, self._loss, call, sample)
        except (MixedExamplesError, LossError, VerificationError):
            raise
        except Exception as e:
            self._raise_own_error(call)
            if isinstance(e, PexgradError):
                raise
            raise TraceError(
                f"the model's graph cannot be evaluated: {type(e).__name__}: {e}; {ANY_MODEL}"
            ) from e
        return pipeline

    def _raise_own_error(self, call: Call) -> None:
        """Where the model or the loss itself fails on this batch, let its own error be the one that is seen."""
        params = {k: p.detach().clone().requires_grad_(k in call.trainable) for k, p in call.params.items()}
        # random numbers are neither drawn nor seeded, and the model may differentiate on its way
        drawn = States(call.module.references)
        with (
            torch.random.fork_rng(devices=()),
            drawn,
            StandStill(),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the model's own, given before
            self._loss.loss(self._model.run(params, call.x), call.y)

    def _signature(self, call: Call) -> Any:
        leaves, spec = trees.flatten(trees.as_call(call.x))
        y_leaves, y_spec = trees.flatten(call.y)
        return (
            call.module.fingerprint(),
            tuple((k, p.shape, p.dtype, p.device, p.stride()) for k, p in call.params.items()),
            tuple((k, b.shape, b.dtype, b.device, _strides(b)) for k, b in call.module.buffers.items()),
            tuple(call.trainable),
            spec, tuple(map(_describe, leaves)), y_spec, tuple(map(_describe, y_leaves)),
            tuple(map(_autocast, sorted({"cpu", *(p.device.type for p in call.params.values())}))),
            global_hooks(), torch.get_default_dtype(), torch.get_default_device(),
            tuple((type(mode), *map(id, held_by(vars(mode)))) for mode in users_modes()),
        )  # fmt: skip


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _strides(t: Tensor) -> tuple[int, ...] | None:
    return t.stride() if t.layout is torch.strided else None


def _describe(v: Any) -> Any:
    """What a trace depends on in an input leaf: everything of a tensor but its batch size, all that any other value holds."""
    if isinstance(v, Tensor):
        return v.shape[1:], v.dtype, v.device, v.stride()[1:]
    # 1, 1.0 and True are equal, but not the same argument to a model
    if isinstance(v, bool | int | float | str | None):
        return type(v), v
    numbers = v.tobytes() if hasattr(v, "tobytes") else None  # of an array, which may change in place
    return tuple(map(id, held_by(v))), numbers


class PerExampleGrad(Transform):
    """`(params, x, y=None, out=None) -> {name: (B, *shape)}`; made by `per_example_grad`."""

    @composable
    def __call__(
        self, params: Params, x: Any, y: Any = None, *, out: Mapping[str, Tensor] | None = None
    ) -> Any:
        call = self._check(params, x, y)
        buffers = None if out is None else check_out(out, call, self._options.create_graph)
        return self._repeats.answer(self, call, lambda known: self._into(buffers, call, known), buffers)

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

    def _assembled(self, paths: nested.Structure, flat: list[Tensor]) -> Any:
        return nested.at(paths, flat)

    def _outline(self, entries: list[Tensor], batch: Any, device: Any) -> list[Tensor]:
        return [p.new_empty((batch, *p.shape), device=device) for p in entries]


class PerExampleValueAndGrad(PerExampleGrad):
    """`(params, x, y=None, out=None) -> (losses (B,), {name: (B, *shape)})`; made by `per_example_value_and_grad`."""

    def _result(self, losses: Tensor, rows: dict[str, Tensor]) -> Any:
        return losses, rows

    def _assembled(self, paths: nested.Structure, flat: list[Tensor]) -> Any:
        return flat[0], nested.at(paths, flat[1:])

    def _outline(self, entries: list[Tensor], batch: Any, device: Any) -> list[Tensor]:
        return [example_numbers(entries, batch, device), *super()._outline(entries, batch, device)]


class PerExampleGradNorm(Transform):
    """`(params, x, y=None) -> (B,)`, or `{name: (B,)}`; made by `per_example_grad_norm`."""

    def __init__(self, model: Model, loss: Loss, options: Options, per_param: bool):
        super().__init__(model, loss, options)
        self._per_param = per_param

    @composable
    def __call__(self, params: Params, x: Any, y: Any = None) -> Any:
        call = self._check(params, x, y)
        return self._repeats.answer(self, call, lambda known: self._run(call, known))

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Any:
        return jacobian.norms(self._per_param)

    def _assembled(self, paths: nested.Structure, flat: list[Tensor]) -> Any:
        return nested.at(paths, flat) if self._per_param else flat[0]

    def _outline(self, entries: list[Tensor], batch: Any, device: Any) -> list[Tensor]:
        return [
            example_numbers(some, batch, device)
            for some in ([[p] for p in entries] if self._per_param else [entries])
        ]


class PerExampleJacobian(Transform):
    """`(params, x, y=None) -> Jacobian`; made by `per_example_jacobian`."""

    _is_of_tensors = False

    @composable
    def __call__(self, params: Params, x: Any, y: Any = None) -> Jacobian:
        call = self._check(params, x, y)
        if not call.batch:
            return self._jacobian(call)
        pipeline = self._pipeline_or_none(call)
        constants = [] if pipeline is None else pipeline.trace.constants()
        return self._jacobian_by(pipeline, call).watching(call, constants)


class ClippedGrad(Transform):
    """`(params, x, y=None, mask=None) -> Clipped`; made by `clipped_grad`."""

    def __init__(self, model: Model, loss: Loss, options: Options, clipping: Clipping):
        super().__init__(model, loss, options)
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
            return self._repeats.answer(self, call, lambda known: self._run(call, known))
        part = self._run(call.chosen(mask))
        return Clipped(part.grads, _spread(part.norms, mask), _spread(part.losses, mask))

    def _run(self, call: Call, pipeline: Pipeline | None = None) -> Clipped:
        if not call.batch:  # which a function for the weights need not take
            return Clipped(call.zeros(), call.no_numbers(), call.no_numbers())
        return super()._run(call, pipeline)

    def _written_in(self) -> list[Callable[..., Any]]:
        return [*super()._written_in(), *([self._clipping.how] if callable(self._clipping.how) else [])]

    def _check_mask(self, call: Call, mask: Tensor) -> None:
        super()._check_mask(call, mask)
        if callable(self._clipping.how):
            raise InputError(
                "clipped_grad takes no mask= inside a torch.func transform where clip is a function: it would see norms of "
                'examples that do not count; use clip="flat", "per_parameter" or "automatic"'
            )

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Clipped:
        jacobian = jacobian.keep()  # what the rows were kept of goes
        weights, norms = self._clipping.weights(jacobian)
        if not further:
            return Clipped(jacobian.vjp(weights), norms, jacobian.losses)
        (mask,) = further  # the examples that it leaves out are copies of one that counts, if there is one

        def only(w: Tensor) -> Tensor:
            return torch.where(mask, w, 0)

        weights = {k: only(w) for k, w in weights.items()} if isinstance(weights, dict) else only(weights)
        grads = {k: torch.where(mask.any(), g, 0) for k, g in jacobian.vjp(weights).items()}
        return Clipped(grads, only(norms), only(jacobian.losses))

    def _assembled(self, paths: nested.Structure, flat: list[Tensor]) -> Any:
        return Clipped(nested.at(paths, flat[:-2]), flat[-2], flat[-1])

    def _outline(self, entries: list[Tensor], batch: Any, device: Any) -> list[Tensor]:
        grads = [p.new_empty(p.shape, device=device) for p in entries]
        return [*grads, *(example_numbers(entries, batch, device) for _ in range(2))]


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    return values.new_zeros(mask.shape[0]).masked_scatter(mask.to(values.device), values)
