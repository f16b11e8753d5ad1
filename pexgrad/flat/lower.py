"""A transform of one input signature as one flat graph: forward, cotangents and rules, with no autograd inside.

The eager call runs once on fake tensors while `make_fx` writes down every ATen operation, those of the backward
included. A second pass, under functionalisation, takes away operations in place, and `make_portable` replaces what else stands
in the way of running the graph elsewhere.

The batch size stays symbolic where the model's loss and rules work on the whole batch at once. Where something loops over
examples (a loss written for one example, the fallback for an operation without a rule), the graph is for one batch size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..base.compare import agree_nearby, largest_error
from ..base.doubts import noting_doubts
from ..base.fakes import HINT, Guards, computes_metadata, fake_batch, quiet, symbolic_len, symbolic_mode
from ..base.modes import differentiable_kernels, uncompiled, unvalidated
from ..base.nodes import where
from ..base.still import StandStill
from ..base.symbols import expression
from ..errors import TraceError, VerificationError, first_line
from ..inputs.arguments import Options
from ..inputs.call import Call
from ..pipeline import Pipeline
from ..stages.strides import copy_what_is_read_by_strides
from ..tracing.backward import BACKWARD
from ..tracing.numbers import noting_numbers
from ..tracing.opaque import is_opaque
from .lowered import Lowered
from .portable import make_portable, reshape_views, without_checks

aten = torch.ops.aten

# what a transform returns, from the Jacobian of the whole batch and further (B, ...) tensors
Answer = Callable[..., Any]


def lower_doubting(pipeline: Pipeline, call: Call, options: Options, answer: Answer) -> Lowered:
    """The graph of a call for its batch size, unverified, with the same bits; its last result says when not to trust them."""
    _refuse_readings(pipeline)
    return _Recording(pipeline, call, options, answer, ()).made(symbolic=False, doubting=True)


def lower(
    pipeline: Pipeline, call: Call, options: Options, answer: Answer, further: Sequence[Tensor] = ()
) -> Lowered:
    """The graph of a call, for every batch size if that is possible and for this one if not.

    `further` are (B, ...) tensors that the answer takes beside the Jacobian: the graph's last inputs.
    """
    if options.create_graph:
        _refuse_stop_gradients(pipeline)
    _refuse_readings(pipeline)
    recorded = replace(options, conv_rule=_batchwise(options.conv_rule))
    recording = _Recording(pipeline, call, recorded, answer, further)
    lowered = None
    # some operations' shape functions take no symbolic size
    with quiet(), contextlib.suppress(TraceError):
        lowered = recording.made(symbolic=True)
        lowered = recording.tried_on_no_examples(lowered)
    if lowered is None or not lowered.serves(call.batch):
        lowered = recording.made(symbolic=False)
    if options.verify:
        replace(recording, options=options).verify(lowered)
    return lowered


def _refuse_readings(pipeline: Pipeline) -> None:
    for reading, _ in pipeline.trace.readings:
        raise TraceError(
            f"the model's Python code reads a number from tensors (at {reading.source}), which is checked at every call of the "
            "function and cannot be in a flat graph; call the function itself"
        )


@dataclass(frozen=True, eq=False)
class _Recording:
    """A call to be written down as a graph."""

    pipeline: Pipeline
    call: Call
    options: Options
    answer: Answer
    further: Sequence[Tensor]

    def made(self, *, symbolic: bool, doubting: bool = False) -> Lowered:
        """The graph, for a symbolic batch size or that of the call; with `doubting` its last result says when not to trust it."""
        mode, env = symbolic_mode()
        fakes = self._fakes(mode, symbolic)
        batch = fakes[-1].shape[0]
        symbol = expression(batch) if symbolic else None  # read now: the recording may fix it
        found: dict[str, Any] = {}

        def run(*flat: Tensor) -> list[Tensor]:
            jacobian = self.pipeline.jacobian(self.call.around(flat, batch), self.options)
            further = flat[len(flat) - len(self.further) :]
            with noting_doubts(doubts) if doubting else contextlib.nullcontext():
                leaves, found["spec"] = pytree.tree_flatten(self.answer(jacobian, *further))
            return leaves + ([torch.stack(doubts).any()] if doubts else [])

        numbers: list[Any] = []
        doubts: list[Tensor] = []
        with noting_numbers(numbers):
            module = _make_graph(run, fakes)
        without_checks(module.graph)
        if any(map(_writes, module.graph.nodes)):
            reshape_views(module.graph)
            module.recompile()
            functional = dispatch_functionalize(module, FunctionalTensorMode())
            # detached: derivatives are in the graph by now, and it no longer says where autograd was off
            module = _make_graph(functional, [t.detach() for t in fakes])
        make_portable(module.graph, differentiable=self.options.create_graph)
        copy_what_is_read_by_strides(module.graph)
        module.recompile()
        served = int(batch) if symbol is None else Guards(symbol, tuple(_guards(env, symbol)))
        return Lowered(module, found["spec"], served, bool(numbers), bool(doubts))

    def _fakes(self, mode: FakeTensorMode, symbolic: bool) -> list[Tensor]:
        tensors = (*self.call.inputs(), *self.call.targets(), *self.further)
        batches = (fake_batch(mode, t, HINT if symbolic else t.shape[0], fixed=not symbolic) for t in tensors)
        return [*self.call.fakes(mode), *batches]

    def tried_on_no_examples(self, lowered: Lowered) -> Lowered:
        """The same graph, for at least one example if it fails on an empty batch: no guard says that an operation refuses one."""
        if not isinstance(lowered.batch, Guards) or not lowered.serves(0):
            return lowered
        try:
            with StandStill():
                lowered.module.forward(*self.call.examples(0, 0).flat(), *(t[:0] for t in self.further))
        except Exception:  # noqa: BLE001 - operations raise what they like
            symbol, conditions = lowered.batch.batch, lowered.batch.conditions
            # not evaluated: sympy takes the symbol of a size for a positive number, of which this is always true
            some = sympy.Ge(symbol, 1, evaluate=False)
            return replace(lowered, batch=Guards(symbol, (*conditions, some)))
        return lowered

    def verify(self, lowered: Lowered) -> None:
        """Raise where the graph and the call itself give different results."""
        found = self._error(lowered, self.call)
        at = self.call.at_leaves()
        if found and not agree_nearby(found, lambda part: not self._error(lowered, at.moved(part))):
            raise VerificationError(
                f"the flat graph of this call differs from the call itself by a relative error of {found:.1e}; "
                "call the function itself"
            )

    def _error(self, lowered: Lowered, at: Call) -> float:
        with StandStill():
            want = self.answer(self.pipeline.jacobian(at.at_leaves(), self.options), *self.further)
            try:
                got = lowered.run([*at.flat(), *self.further])
            except Exception as e:  # an operation in it has no derivative, say
                raise TraceError(
                    f"the flat graph of this call does not run: {type(e).__name__}: {first_line(e)}; call the function itself"
                ) from e
        results = (
            {str(i): t.detach() for i, t in enumerate(pytree.tree_leaves(tree))} for tree in (got, want)
        )
        worst = largest_error(*results, half=self.pipeline.trace.rounds_to_half())
        return 0.0 if worst is None else worst[1]


def _guards(env: ShapeEnv, batch: sympy.Symbol) -> Iterator[sympy.Basic]:
    """What the recording took for granted about the batch size, except to compute metadata."""
    for guard in env.guards:
        filename = getattr(guard.sloc.framework_loc, "filename", str(guard.sloc.framework_loc))
        if not computes_metadata(filename):
            yield guard.expr
    if batch in env.replacements:
        yield sympy.Eq(batch, env.replacements[batch])


def _batchwise(conv_rule: str) -> str:
    """A convolution rule that works on the whole batch at once, whatever its size."""
    return "unfold" if conv_rule in ("auto", "measure", "loop") else conv_rule


def _make_graph(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    try:
        # fused attention has no rule for vmap and no second derivative; its parts have both
        with uncompiled(), unvalidated(), symbolic_len(), differentiable_kernels(True):
            record = make_fx(function, BACKWARD, tracing_mode="fake", _allow_non_fake_inputs=True)
            module = record(*fakes)
    except Exception as e:
        raise TraceError(
            f"this call cannot be lowered to one flat graph: {type(e).__name__}: {first_line(e)}; "
            "call the function itself"
        ) from e
    module.graph.eliminate_dead_code()
    return module


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _refuse_stop_gradients(pipeline: Pipeline) -> None:
    for node in pipeline.program.module.graph.nodes:
        if node.target in (aten.detach.default, torch._C._set_grad_enabled) or is_opaque(node):
            raise TraceError(
                f"the model stops or changes gradients ({where(node)}), which a flat graph keeps for the rows but not for "
                "derivatives of the rows; leave create_graph off, or differentiate the function itself with torch.autograd.grad"
            )
