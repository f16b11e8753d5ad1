"""Stage 1: the model as a pre-dispatch ATen graph in which only the batch size is symbolic.

Parameters, buffers and input tensors are the graph's placeholders; its outputs are the tensors of the
model's output. Nothing of the user's module changes: the code of a structural copy runs on fake tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..base import trees
from ..base.fakes import TRACING, Guards, fake_batch, symbolic_mode
from ..base.nodes import eliminate_dead_code, source, value
from ..base.numerics import is_half
from ..base.symbols import expression, symbol_of
from ..errors import ANY_MODEL, PexgradError, TraceError, first_line
from ..inputs.call import Call
from ..inputs.rebind import Bound, uncached
from .below import BELOW
from .decompositions import DECOMPOSITIONS
from .disguise import disguised
from .inner import ON_DERIVATIVES, cutting
from .opaque import settle_hooks
from .origins import module_paths, user_line
from .outputs import FROM_GRAPH, stand_in
from .readings import Answer, Reader, Reading
from .watching import Asked, watching


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced model: `graph` takes parameters, buffers, then input tensors, and returns output tensors."""

    graph: fx.Graph
    root: nn.Module  # holds the graph's constants
    fake_mode: FakeTensorMode
    batch: sympy.Symbol
    params: dict[str, fx.Node]
    inputs: list[fx.Node]
    output_leaves: list[Any]  # a stand-in where the graph's output provides a tensor
    output_spec: pytree.TreeSpec
    guards: Guards
    readings: tuple[tuple[Reading, Answer], ...]
    asked: list[Tensor]  # others that the model's code has used, if only for their shapes
    reads_numbers: bool  # whether Python code took numbers out of tensors, perhaps out of constants
    below: bool  # whether it was recorded below autograd, and below autocast

    def serves(self, batch_size: int) -> bool:
        """Whether every branch that the model's code took on the batch size goes the same way here."""
        return self.guards.hold(batch_size)

    def follows(self, call: Call) -> bool:
        """Whether every number that the model's code read from tensors is what it was, for each of these examples."""
        return all(a == answer for reading, answer in self.readings for a in reading.answers(call))

    def constants(self) -> list[Tensor]:
        """Tensors that are neither parameters nor buffers nor inputs."""
        return [t for t in self._held() if isinstance(t, Tensor)]

    def generators(self) -> list[torch.Generator]:
        """Those that random operations draw from, beside the default ones."""
        return [g for g in self._held() if isinstance(g, torch.Generator)]

    def _held(self) -> Iterator[Any]:
        return (getattr(self.root, str(n.target), None) for n in self.graph.nodes if n.op == "get_attr")

    def rounds_to_half(self) -> bool:
        """Whether any value is in half precision, as it is under autocast."""
        return any(is_half(t.dtype) for n in self.graph.nodes for t in trees.tensors(value(n)))

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output object around the graph's output tensors."""
        left = iter(tensors)
        leaves = [next(left) if leaf is FROM_GRAPH else leaf for leaf in self.output_leaves]
        return trees.unflatten(leaves, self.output_spec)


def trace(model: Bound, call: Call, hint: int) -> Trace:
    """Trace `model` on fake parameters and inputs shaped like a call's, with a symbolic batch size."""
    with TRACING:
        with disguised(False) as asked:
            try:
                return _above_or_below_autograd(model, call, hint)
            except TraceError as e:
                first = e
        if asked:
            with contextlib.suppress(TraceError), disguised(True):
                return _above_or_below_autograd(model, call, hint)
        raise first


def _above_or_below_autograd(model: Bound, call: Call, hint: int) -> Trace:
    """The trace, recorded below autograd where the model's own code takes derivatives."""
    asked = Asked()
    try:
        traced = _trace(model, call, hint, asked)
    except TraceError:
        if not asked.differentiates:
            raise
    else:
        if not asked.differentiates:
            return traced
    with cutting():
        return _trace(model, call, hint, Asked(), below=True)


def _trace(model: Bound, call: Call, hint: int, asked: Asked, *, below: bool = False) -> Trace:
    mode, env = symbolic_mode()
    # code may ask whether an input is differentiated
    inputs = [fake_batch(mode, t, hint).requires_grad_(t.requires_grad) for t in call.inputs()]
    batch = symbol_of(inputs[0].shape[0])
    seen: dict[str, Any] = {}

    def run(*flat: Tensor) -> list[Tensor]:
        at = replace(call, y=None).around(flat, inputs[0].shape[0]).with_inputs(_writable)
        forward = model.at(at.params, dict(zip(call.module.buffers, at.buffers, strict=True)))
        args, kwargs = at.x
        with module_paths(forward), uncached(), asked:
            out = forward(*args, **kwargs)
        out_leaves, seen["spec"] = trees.flatten(out)
        seen["leaves"] = [stand_in(v) for v in out_leaves]
        return [v for v in out_leaves if isinstance(v, Tensor)]

    reader = Reader(call, batch)
    with watching(batch, reader) as branches:
        gm = _recorded(run, [*call.fakes(mode), *inputs], below=below)
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    _use_instead_of_copies(nodes[len(nodes) - len(inputs) :])
    settle_hooks(gm.graph)  # one that was registered last has no use yet
    eliminate_dead_code(gm.graph)
    reader.settle(gm)
    _refuse_fixed_batch(env, batch, reader, below=below)
    _refuse_shapes_of_data(gm.graph, batch)
    _refuse_escaped(gm)
    if not seen["leaves"] or FROM_GRAPH not in seen["leaves"]:
        raise TraceError(
            "the model's output holds no tensor; return tensors, in any nesting of tuples, lists and dicts"
        )
    return Trace(
        graph=gm.graph,
        root=gm,
        fake_mode=mode,
        batch=batch,
        params=dict(zip(call.params, nodes, strict=False)),
        inputs=nodes[len(nodes) - len(inputs) :],
        output_leaves=seen["leaves"],
        output_spec=seen["spec"],
        guards=Guards(batch, tuple(branches)),
        readings=reader.readings(),
        asked=[*asked.tensors.values()],
        reads_numbers=bool(reader.numbers),
        below=below,
    )


def _writable(t: Tensor) -> Tensor:
    """An input that code may write to: a leaf that is differentiated takes nothing in place."""
    return t.clone() if t.requires_grad else t


def _use_instead_of_copies(inputs: list[fx.Node]) -> None:
    """Without the copies that `_writable` makes; those that are written to are made anew in the end."""
    for n in inputs:
        if value(n).requires_grad:
            for copy in [*n.users]:
                copy.replace_all_uses_with(n)
                n.graph.erase_node(copy)


def _recorded(run: Callable[..., list[Tensor]], fakes: list[Tensor], *, below: bool) -> fx.GraphModule:
    try:
        return make_fx(
            run,
            decomposition_table=BELOW if below else DECOMPOSITIONS,
            tracing_mode="fake",
            pre_dispatch=not below,
            _allow_non_fake_inputs=True,
        )(*fakes)
    except PexgradError:
        raise
    except Exception as e:
        raise TraceError(
            f"the model has no static graph: {type(e).__name__}: {first_line(e)}{user_line(e)}; "
            f"{ON_DERIVATIVES if below else _reason(e)}: {ANY_MODEL}"
        ) from e


def _reason(e: Exception) -> str:
    if isinstance(e, UnsupportedOperatorException):
        return "torch knows no shape of its result"
    if isinstance(e, TypeError) and "SymInt" in str(e):
        return (
            "the batch size stands for any number there, and cannot be in the key of a dict (x.shape[1:] can)"
        )
    return "control flow or shapes that depend on data cannot be traced"


def _refuse_fixed_batch(env: ShapeEnv, batch: sympy.Symbol, reader: Reader, *, below: bool) -> None:
    if batch not in env.replacements:
        return
    if reader.fixed_at:
        who = f"the model (at {reader.fixed_at})"
        remedy = "keep it as x.shape[0] or len(x), without int(), range() or a loop over the examples"
    else:
        inside = f" (at {reader.fixed_in})" if reader.fixed_in else ""
        who = f"a function of torch that the model calls{inside}"
        remedy = "write it out in simpler operations, without a loop over the examples"
    raise TraceError(
        f"{who} turns the batch size into a plain number, so that its graph holds for one batch size only; "
        f"{ON_DERIVATIVES if below else remedy}; {ANY_MODEL}"
    )


def _refuse_escaped(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(gm, str(node.target), None), FakeTensor):
            at = source(next(iter(node.users)))
            raise TraceError(
                f"a value that the model uses (at {at}) was computed behind the trace: perhaps by a custom autograd.Function "
                "that saves its output for its backward, in a model that takes derivatives in its own forward (let it save its "
                f"inputs alone); {ANY_MODEL}"
            )


def _refuse_shapes_of_data(graph: fx.Graph, batch: sympy.Symbol) -> None:
    for node in graph.nodes:
        val = value(node)
        sizes = [n for n in val.shape if isinstance(n, torch.SymInt)] if isinstance(val, Tensor) else []
        if any(expression(n).free_symbols - {batch} for n in sizes):
            raise TraceError(
                f"the shape of {node.name} depends on data (at {source(node)}), so the "
                f"model has no static graph; use masks instead of selecting by value, or {ANY_MODEL}"
            )
