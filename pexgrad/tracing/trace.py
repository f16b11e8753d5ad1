"""Stage 1: the model as a pre-dispatch ATen graph in which only the batch size is symbolic.

Parameters, buffers and input tensors are the graph's placeholders; its outputs are the tensors of the
model's output. Nothing of the user's module changes: the code of a structural copy runs on fake tensors.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ..base import trees
from ..base.fakes import (
    TRACING,
    Guards,
    computes_metadata,
    expression,
    fake,
    fake_batch,
    quiet,
    symbol_of,
    symbolic_len,
    symbolic_mode,
)
from ..base.numerics import is_half
from ..errors import ANY_MODEL, PexgradError, TraceError, first_line
from ..inputs.call import Call
from ..inputs.rebind import Bound, uncached
from .decompositions import DECOMPOSITIONS
from .disguise import disguised
from .numbers import noting_numbers
from .opaque import opaque_functions, traced_data, traced_hooks
from .origins import module_paths, noting_source, user_line
from .outputs import FROM_GRAPH, stand_in
from .readings import Answer, Reader, Reading, answering, holds


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
    reads_numbers: bool  # whether Python code took numbers out of tensors, perhaps out of constants

    def serves(self, batch_size: int) -> bool:
        """Whether every branch that the model's code took on the batch size goes the same way here."""
        return self.guards.hold(batch_size)

    def follows(self, call: Call) -> bool:
        """Whether every number that the model's code read from tensors is what it was, for each of these examples."""
        return holds(self.readings, call)

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
        return any(is_half(t.dtype) for n in self.graph.nodes for t in trees.tensors(n.meta.get("val")))

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
                return _trace(model, call, hint)
            except TraceError as e:
                first = e
        if asked:
            with contextlib.suppress(TraceError), disguised(True):
                return _trace(model, call, hint)
        raise first


def _trace(model: Bound, call: Call, hint: int) -> Trace:
    params, buffers = call.params, call.module.buffers
    leaves, spec = trees.flatten(trees.as_call(call.x))
    mode, env = symbolic_mode()
    fake_params = [fake(mode, p).requires_grad_(k in call.trainable) for k, p in params.items()]
    fake_buffers = [fake(mode, b) for b in buffers.values()]
    fake_inputs = [fake_batch(mode, t, hint) for t in call.inputs()]
    batch = symbol_of(fake_inputs[0].shape[0])
    seen: dict[str, Any] = {}

    def run(*flat: Tensor) -> list[Tensor]:
        left = iter(flat)
        p = {k: next(left) for k in params}
        b = {k: next(left) for k in buffers}
        args, kwargs = trees.unflatten([next(left) if isinstance(v, Tensor) else v for v in leaves], spec)
        forward = model.at(p, b)
        with module_paths(forward), uncached():
            out = forward(*args, **kwargs)
        out_leaves, seen["spec"] = trees.flatten(out)
        seen["leaves"] = [stand_in(v) for v in out_leaves]
        return [v for v in out_leaves if isinstance(v, Tensor)]

    reader = Reader(call, batch)
    with _tracing(batch, reader) as branches:
        try:
            gm = make_fx(
                run,
                decomposition_table=DECOMPOSITIONS,
                tracing_mode="fake",
                pre_dispatch=True,
                _allow_non_fake_inputs=True,
            )(*fake_params, *fake_buffers, *fake_inputs)
        except PexgradError:
            raise
        except Exception as e:
            raise TraceError(
                f"the model has no static graph: {type(e).__name__}: {first_line(e)}{user_line(e)}; "
                f"control flow or shapes that depend on data cannot be traced: {ANY_MODEL}"
            ) from e
    gm.graph.eliminate_dead_code()
    reader.settle(gm.graph, gm)
    _refuse_fixed_batch(env, batch, reader.fixed_at)
    _refuse_shapes_of_data(gm.graph, batch)
    if not seen["leaves"] or FROM_GRAPH not in seen["leaves"]:
        raise TraceError(
            "the model's output holds no tensor; return tensors, in any nesting of tuples, lists and dicts"
        )
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return Trace(
        graph=gm.graph,
        root=gm,
        fake_mode=mode,
        batch=batch,
        params=dict(zip(params, nodes, strict=False)),
        inputs=nodes[len(params) + len(buffers) :],
        output_leaves=seen["leaves"],
        output_spec=seen["spec"],
        guards=Guards(batch, tuple(branches)),
        readings=reader.readings(),
        reads_numbers=bool(reader.numbers),
    )


# --- what the trace must notice while it runs -----------------------------------------------------


@contextlib.contextmanager
def _tracing(batch: sympy.Symbol, reader: Reader) -> Iterator[list[sympy.Basic]]:
    """Gives the conditions on the batch size that the model's own code branches on."""
    branches: list[sympy.Basic] = []
    running: list[None] = []  # one entry for each operation that is running, the innermost last
    with (
        torch.enable_grad(),
        opaque_functions(),
        traced_hooks(),
        traced_data(),
        quiet(),
        answering(reader, running),
        torch.backends.opt_einsum.flags(enabled=False),  # its search for a path fixes every size
        symbolic_len(),
        mock.patch.object(nn.Module, "_apply", _in_this_thread(_apply, nn.Module._apply)),
        mock.patch.object(nn.TransformerEncoder, "forward", _without_nesting(nn.TransformerEncoder.forward)),
        noting_numbers(reader.numbers),
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", _no_metadata),
        mock.patch.object(PythonKeyTracer, "create_node", noting_source(PythonKeyTracer.create_node)),
        mock.patch.object(proxy_tensor, "proxy_call", _noting_depth(proxy_tensor.proxy_call, running)),
        mock.patch.object(SymNode, "bool_", _noting_branches(SymNode.bool_, batch, branches, running)),
    ):
        yield branches


def _noting_depth(call: Callable[..., Any], running: list[None]) -> Callable[..., Any]:
    """Note how deep operations are in one another."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        running.append(None)
        try:
            return call(*args, **kwargs)
        finally:
            running.pop()

    return noted


def _noting_branches(
    bool_: Callable[[SymNode], bool], batch: sympy.Symbol, branches: list[sympy.Basic], running: list[None]
) -> Callable[[SymNode], bool]:
    """Note what Python code asks; what operations ask while they run is metadata, on which the graph does not depend."""

    def noted(self: SymNode) -> bool:
        condition = self.expr
        answer = bool_(self)
        if not running and condition.free_symbols == {batch} and not _is_metadata(sys._getframe(1)):
            branches.append(condition if answer else sympy.Not(condition))
        return answer

    return noted


def _no_metadata(*_: Any) -> None:
    """In place of what torch notes of each value, in a fifth of the time of a trace, and nobody reads here."""


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)` inside a forward: the copy that is traced simply holds the converted tensors."""
    for m in module.modules() if recurse else (module,):
        for held in (m._parameters, m._buffers):
            held.update({k: fn(t) for k, t in held.items() if t is not None})  # type: ignore[misc]
    return module


def _in_this_thread(patched: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    here = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        return (patched if threading.get_ident() == here else real)(*args, **kwargs)

    return run


def _without_nesting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An encoder that is differentiated uses no nested tensors, but asks first whether its mask allows them, which is data."""

    def run(self: nn.TransformerEncoder, src: Tensor, *args: Any, **kwargs: Any) -> Any:
        differentiated = src.requires_grad or any(p.requires_grad for p in self.layers[0].parameters())
        if not (differentiated and torch.is_grad_enabled()):
            return forward(self, src, *args, **kwargs)
        with mock.patch.object(torch, "_nested_tensor_from_mask_left_aligned", return_value=False):
            return forward(self, src, *args, **kwargs)

    return run


def _is_metadata(frame: FrameType | None) -> bool:
    for _ in range(6):
        if frame is None:
            return False
        if computes_metadata(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _refuse_fixed_batch(env: ShapeEnv, batch: sympy.Symbol, fixed_at: str) -> None:
    if batch not in env.replacements:
        return
    line = f" (at {fixed_at})" if fixed_at else ""
    raise TraceError(
        f"the model turns the batch size into a plain number{line}, so that its graph holds for one batch size only; keep it as "
        f"x.shape[0] or len(x), without int(), range() or a loop over the examples; {ANY_MODEL}"
    )


def _refuse_shapes_of_data(graph: fx.Graph, batch: sympy.Symbol) -> None:
    for node in graph.nodes:
        val = node.meta.get("val")
        sizes = [n for n in val.shape if isinstance(n, torch.SymInt)] if isinstance(val, Tensor) else []
        if any(expression(n).free_symbols - {batch} for n in sizes):
            raise TraceError(
                f"the shape of {node.name} depends on data (at {node.meta.get('source', 'an unknown line')}), so the "
                f"model has no static graph; use masks instead of selecting by value, or {ANY_MODEL}"
            )
