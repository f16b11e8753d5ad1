"""What looks at all examples inside what a graph holds as one node: a custom `autograd.Function`, a tensor hook, a loop.

Forward and backward of a function are written down by themselves, for every batch size, and looked at as the graph around them
is; so are the condition and the body of `torch.while_loop`, and what is in others of its kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..base import trees
from ..base.fakes import HINT, TRACING, fake_batch, quiet, symbolic_len, symbolic_mode
from ..base.nodes import is_differentiable, is_of_batch, nodes_in, returned, value
from ..base.symbols import expression, symbol_of
from ..tracing.opaque import is_opaque
from .mixing_by_shape import Mixing, first_mixing


def mixing_inside(node: fx.Node, batch: Any) -> Mixing | None:
    """The first operation by which examples mix in what a node stands for; None where there is none, or where it has no graph."""
    return (_in_function if is_opaque(node) else _in_graphs)(node, batch)


def _in_function(node: fx.Node, batch: Any) -> Mixing | None:
    given = [value(n) for n in node.all_input_nodes]
    if not is_of_batch(given, batch) or not all(isinstance(v, Tensor) for v in given):
        return None
    with contextlib.suppress(Exception), quiet(), TRACING, symbolic_len():  # it may do what no graph can
        return _first_in(*_recorded(node, given, batch))
    return None


def _first_in(graph: fx.Graph, size: Any) -> Mixing | None:
    symbol = symbol_of(size)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    outputs = [n for n in returned(graph) if isinstance(n, fx.Node) and is_of_batch(value(n), symbol)]
    return first_mixing(graph, inputs, outputs, symbol)


def _in_graphs(node: fx.Node, batch: Any) -> Mixing | None:
    """In the graphs that an operation is given: what they compute, and what decides how often they run."""
    for given in node.all_input_nodes:
        inner = getattr(node.graph.owning_module, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            inputs = [n for n in inner.graph.nodes if n.op == "placeholder" and is_of_batch(value(n), batch)]
            outputs = list(nodes_in(returned(inner.graph)))
            found = first_mixing(inner.graph, inputs, outputs, batch, of_numbers=False)
            nested = (_in_graphs(n, batch) for n in inner.graph.nodes)
            if (found := found or next(filter(None, nested), None)) is not None:
                return found
    return None


def _recorded(node: fx.Node, given: Sequence[Tensor], batch: Any) -> tuple[fx.Graph, Any]:
    """Forward and backward of an opaque node as a graph of the operands and the results' cotangents; its batch size."""
    mode, size = _symbolic_size()
    results = [t for t in trees.tensors(value(node)) if is_differentiable(t)]
    fakes = [_like(mode, t, batch, size) for t in (*given, *results)]
    function: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType]

    def run(*flat: Tensor) -> Sequence[Tensor | None]:
        inputs = [t.detach().requires_grad_(is_differentiable(t)) for t in flat[: len(given)]]
        with torch.enable_grad():
            own = [t.clone() for t in inputs]  # it may write to them
            of = dict(zip(node.all_input_nodes, own, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), of.__getitem__)
            outputs = trees.tensors(function(*args, **kwargs))
        arriving = zip(filter(is_differentiable, outputs), flat[len(given) :], strict=True)
        followed = [(out, g) for out, g in arriving if out.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        if not followed:
            return outputs
        tensors, cotangents = zip(*followed, strict=True)
        return [*outputs, *torch.autograd.grad(tensors, leaves, cotangents, allow_unused=True)]

    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes).graph
    return graph, size


def _symbolic_size() -> tuple[FakeTensorMode, Any]:
    """A batch size of its own: what is fixed with it must not fix the sizes in the graph around it."""
    mode, _ = symbolic_mode()
    return mode, fake_batch(mode, torch.empty(HINT, 1)).shape[0]


def _like(mode: FakeTensorMode, t: Tensor, batch: Any, size: Any) -> Tensor:
    """A tensor of the same shape, for another symbol in the place of the batch size."""
    sizes = [int(expression(n) / batch) * size if isinstance(n, torch.SymInt) else n for n in t.shape]
    with mode:
        return torch.empty(sizes, dtype=t.dtype, device=t.device)
