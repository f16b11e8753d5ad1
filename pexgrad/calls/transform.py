"""What all transforms share: from a model to a pure function of its parameters, which traces once for each input signature."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from ..base import modes, nested, trees
from ..base.fakes import TRACING
from ..base.modes import differentiable_kernels
from ..base.still import StandStill
from ..definition.remembered import refuse_remembered
from ..definition.strategies import LOOPS
from ..errors import InputError, TraceError
from ..flat.lower import lower_doubting
from ..flat.lowered import Lowered
from ..flat.lowered_module import with_arguments
from ..inputs.arguments import Options, Params, check_call, check_functions
from ..inputs.call import Call
from ..inputs.known import refuse_known
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction
from ..losses.torch_losses import Loss
from ..operator.jacobian import Jacobian
from ..pipeline import Pipeline
from ..stages.layout import UntoldError
from . import compiled
from .compose import as_dict, composable
from .explain import Explanation, explain
from .graphs import Graphs
from .pickling import check_pickles
from .repeats import may_repeat
from .results import Part, join, nest
from .traces import Traces

if TYPE_CHECKING:
    from typing_extensions import Self

Model = nn.Module | Callable[..., Any]

# attributes that `_begin` sets, also of a copy
_MADE_ANEW = ("_traces", "_graphs", "_by_structure", "_handle")


class Transform:
    """A function of parameters and a batch. Each kind says what it computes from the batch's Jacobian, and its parts."""

    __call__: Callable[..., Any]

    def __init__(
        self, model: Model, loss: Loss, options: Options, *, beside: Sequence[Callable[..., Any]] = ()
    ):
        check_functions(model, loss)
        self._model, self._loss, self._options = Bound(model), LossFunction(loss), options
        self._beside = beside  # further functions of the user's that a recorded graph has written into it
        self._begin()

    def _begin(self) -> None:
        """Begin without anything that was traced."""
        owner = type(self).__name__
        self._traces = Traces(self._model, self._loss, verified=self._options.verify, owner=owner)
        self._graphs = Graphs([self._loss.loss, *self._beside])
        self._by_structure: dict[nested.Structure, Self] = {}
        self._handle = compiled.handle(self)

    def __repr__(self) -> str:
        model, loss = (getattr(f, "__name__", type(f).__name__) for f in (self._model.model, self._loss.loss))
        return f"{type(self).__name__}({model}, loss={loss})"

    # --- what each kind says --------------------------------------------------------------------------------

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Any:
        """What the transform returns, from the Jacobian of the whole batch and a mask (B,) if it takes one."""
        raise NotImplementedError

    def _check_mask(self, call: Call, mask: Tensor) -> None:
        """Raise where a mask cannot be part of the flat graph."""
        call.check_mask(mask)

    def _parts(self) -> tuple[Part, ...]:
        """The parts of the result, which compiled code has to know in advance; none where the result is an operator."""
        return ()

    def _of_parts(self, *parts: Any) -> Any:
        """The result that is made of these."""
        return parts[0] if len(parts) == 1 else parts

    # --- an ordinary call -----------------------------------------------------------------------------------

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
                refuse_known(self._model.model)
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

    # --- what it tells of itself ----------------------------------------------------------------------------

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

    # --- the flat graph, and nested parameters --------------------------------------------------------------

    def lower(self, params: Params, x: Any, y: Any = None) -> fx.GraphModule:
        """The call as one flat, functional graph of ATen operations: forward, cotangents and rules, no autograd inside.

        >>> graph = per_example_grad(model).lower(params, x, y)
        >>> graph.print_readable()
        >>> graph(params, x, y)["weight"].shape
        torch.Size([5, 2, 3])

        It runs as it is under `torch.func.vmap`, over parameters, data or both, under `torch.compile` and `torch.export`.

        Args:
            params: as for the function; names left out become buffers of the graph module, shared with the model.
            x: inputs (B, ...) of the kind that the graph is for; every batch size is served where the loss and the rules
                work on whole batches, which `graph.meta["batch"]` tells: `"any"`, `"2 or more"`, or the one size. The graph
                refuses any other size; lower again for that one (as the function itself does under `torch.func.vmap`).
            y: targets, likewise.

        Returns:
            A module called like the function, `graph(params, x, y)`, with None for a `y` that there is not.
            Dtypes under autocast are written into it, so run it outside autocast. `chunk_size` and `out` have no part in it.

        Raises:
            PexgradError: where the function itself would refuse, and where the call has no flat graph.
        """
        transform, named, whole = self._by_name(params)
        with modes.outside_transforms(), modes.recording():
            call = check_call(transform._model, *map(modes.recordable, (as_dict(named), x, y)))
            return with_arguments(transform._graph(call), call, (params, x, y), whole)

    def _graph(self, call: Call, *further: Tensor) -> Lowered:
        """The flat graph that serves a call, from the cache if it is there."""
        if not self._parts():
            raise InputError(
                f"{type(self).__name__} returns an operator, which has no flat graph; use a transform of tensors"
            )
        if self._options.strategy != "crb":
            raise TraceError(
                f'strategy={self._options.strategy!r} has no flat graph: it runs the model itself; use "crb"'
            )
        return self._graphs.of(self._traces.of(call), call, self._options, self._answer, further)

    def _flat(self, paths: nested.Structure) -> Self:
        """The same transform of the flat dict of parameters."""
        if self._model.is_module:
            return self
        with TRACING:
            if paths not in self._by_structure:
                flat = Bound(nested.taking_flat(self._model.model, paths))
                self._by_structure[paths] = self._like(self._state() | {"_model": flat})
            return self._by_structure[paths]

    def _by_name(self, params: Params) -> tuple[Self, Params, Callable[[Any], Any]]:
        """The transform of flat parameters, these parameters, and a function that nests results as the given ones are nested."""
        if not nested.is_nested(params):
            return self, params, lambda result: result
        paths = nested.structure(params)
        return self._flat(paths), nested.flatten(params), functools.partial(nest, paths=paths)

    # --- copies: without what has been traced, which they trace again ---------------------------------------

    def _state(self) -> dict[str, Any]:
        """What the transform is made of, without what it has traced."""
        return {k: v for k, v in vars(self).items() if k not in _MADE_ANEW}

    def _like(self, state: dict[str, Any]) -> Self:
        other = object.__new__(type(self))
        other.__setstate__(state)
        return other

    def __getstate__(self) -> dict[str, Any]:
        check_pickles("model", self._model.model)
        check_pickles("loss", self._loss.loss)
        return self._state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __copy__(self) -> Self:
        return self._like(self._state())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._like(copy.deepcopy(self._state(), memo))
