"""Numbers that the model's Python code reads from tensors while it is traced: `if mask.all()`, `lengths.max().item() <= 7`.

A reading is answered for real, on each example as a batch of one, by running the operations it is computed from. Where
every example gives the same answer, the code goes the same way for each of them as it would for that example alone, and
the trace holds wherever they give that answer again, which is checked at every call.

What a reading may depend on: constants, buffers, and either parameters or inputs that are not floating (masks, ids,
lengths). Numbers read from floating inputs, or from activations, are refused: examples would agree on them only by chance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ..base.memory import storage_of
from ..base.nodes import draws, is_model_of, source, storage, value, written_memory
from ..base.numerics import is_inexact
from ..base.source import calling_line
from ..base.symbols import expression, number
from ..errors import ANY_MODEL, TraceError
from ..inputs.call import Call

aten = torch.ops.aten

Answer = bool | int | float


@dataclass(frozen=True, eq=False)
class Reading:
    """What Python code asked of numbers read from tensors, and the answer that it got."""

    asked: Any  # an expression of `symbols`
    kind: type[Answer]
    symbols: tuple[sympy.Symbol, ...]
    program: fx.GraphModule  # the placeholders' values -> the numbers that `symbols` stand for
    of_inputs: bool  # whether their data enters, or only their shapes
    varies: bool  # whether another call may give another answer
    source: str

    def answers(self, call: Call) -> Iterator[Answer]:
        """The answer for each example; one for all where no input's data enters."""
        for b in range(call.batch if self.of_inputs else 1):
            with _disable_current_modes(), torch.no_grad():  # not a part of what is being traced
                numbers = self.program(*call.examples(b, b + 1).values())
            numbers = [int(n) if isinstance(n, bool) else n for n in numbers]
            yield self.kind(self.asked.subs(dict(zip(self.symbols, numbers, strict=True))))


class Reader:
    """Answers what is asked during one trace, and remembers it."""

    def __init__(self, call: Call, batch: sympy.Symbol):
        self.call, self.batch = call, batch
        self.given: dict[tuple[sympy.Basic, type[Answer]], tuple[Reading, Answer]] = {}
        self.numbers: list[Any] = []  # what took a number out of any tensor, constants included
        self.fixed_at = ""  # the last line that asked for the batch size itself, or compared it with a number
        self.fixed_in = ""  # the first line that called a function which did

    def answer(self, asked: sympy.Basic, kind: type[Answer]) -> Answer | None:
        """The answer; None where it is not for numbers read from tensors that are asked."""
        symbols = asked.free_symbols - {self.batch}
        if not symbols or (mode := get_proxy_mode()) is None:
            return None
        if (asked, kind) not in self.given:
            sources: dict[Any, Any] = {s: _source(mode.tracer.graph, s) for s in symbols}
            if None in sources.values() or self._is_fake():
                return None
            return self._given(asked, kind, mode.tracer.root, sources)
        return self.given[asked, kind][1]

    def settle(self, traced: fx.GraphModule) -> None:
        """Write into the graph the numbers that it reads from inputs that are not floating, as if Python had asked for them."""
        for node in list(traced.graph.nodes):
            val = value(node)
            if not isinstance(val, SymInt) or node.target not in _ITEMS or not node.users or self._is_fake():
                continue
            # of others, the probe tells whether one example's number is the batch's
            if not self._refused(_computing(traced, [node], self.batch)):
                symbol = expression(val)
                _put(self._given(symbol, int, traced, {symbol: node}), node)

    def _is_fake(self) -> bool:
        return any(isinstance(t, FakeTensor) for t in self.call.values())

    def _given(self, asked: Any, kind: type[Answer], root: nn.Module, sources: dict[Any, Any]) -> Answer:
        reading = self._reading(asked, kind, root, sources)
        self.given[asked, kind] = reading, (answer := self._agreed(reading))
        return answer

    def _read(self, nodes: list[fx.Node]) -> list[list[fx.Node]]:
        """The parameters, buffers and inputs among the nodes."""
        read, left = set(nodes), (n for n in nodes[0].graph.nodes if n.op == "placeholder")
        kinds = (self.call.params, self.call.buffers, self.call.inputs())
        return [[n for n in islice(left, len(kind)) if n in read] for kind in kinds]

    def _refused(self, nodes: list[fx.Node]) -> str:
        """What the nodes compute from, where examples would agree on it only by chance; nothing where they would not."""
        params, _, inputs = self._read(nodes)
        if any(is_inexact(value(n)) for n in inputs) or (params and inputs):
            return "activations" if params else "floating inputs"
        return ""

    def _reading(self, asked: Any, kind: type[Answer], root: nn.Module, sources: dict[Any, Any]) -> Reading:
        results = list(sources.values())
        nodes = _computing(root, results, self.batch)
        where = source(results[0])
        if what := self._refused(nodes):
            raise TraceError(
                f"the model's Python code reads a number from {what} (at {where}); control flow that depends on such data has no "
                f"graph: use torch.where or a mask, or {ANY_MODEL}"
            )
        if any(draws(n.target) for n in nodes):
            raise TraceError(
                f"the model's Python code reads a random number from a tensor (at {where}), which a graph would keep "
                f"for ever: choose with torch.where, or {ANY_MODEL}"
            )
        program = _program(root, nodes, results, self.batch)
        read = _, _, inputs = self._read(nodes)
        return Reading(
            asked.subs(self.batch, 1), kind, tuple(sources), program, bool(inputs), any(read), where
        )

    def _agreed(self, reading: Reading) -> Answer:
        answers = list(reading.answers(self.call))
        if len(set(answers)) != 1:
            found = ", ".join(f"{a} for example {answers.index(a)}" for a in dict.fromkeys(answers))
            raise TraceError(
                f"the model's Python code reads a number that differs between the examples (at {reading.source}: {found}), so "
                f"no one graph serves them all; call with the examples apart (chunk_size=1), or {ANY_MODEL}"
            )
        return answers[0]

    def readings(self) -> tuple[tuple[Reading, Answer], ...]:
        """Those whose answer may be another one in another call."""
        return tuple((r, a) for r, a in self.given.values() if r.varies)


@contextlib.contextmanager
def answering(reader: Reader, running: list[None]) -> Iterator[None]:
    """Let Python code have its answers; what is asked while operations are `running` is not its own."""

    def patched(plain: Callable[[SymNode, str, int], Answer], kind: type[Answer]) -> Callable[..., Answer]:
        def guard(self: SymNode, file: str, line: int) -> Answer:
            answer = None if running else reader.answer(self.expr, kind)
            if self.expr.free_symbols == {reader.batch}:
                if not running:
                    reader.fixed_at = calling_line()
                elif kind is int:
                    reader.fixed_in = reader.fixed_in or calling_line()
            return plain(self, file, line) if answer is None else answer

        return guard

    with (
        mock.patch.object(SymNode, "guard_bool", patched(SymNode.guard_bool, bool)),
        mock.patch.object(SymNode, "guard_int", patched(SymNode.guard_int, int)),
        mock.patch.object(SymNode, "guard_float", patched(SymNode.guard_float, float)),
    ):
        yield


def _put(answer: Answer, node: fx.Node) -> None:
    """Let the graph use the answer in the node's place."""
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda n: answer if n is node else n)
    node.graph.erase_node(node)


# operations that read a number
_ITEMS = (aten.item.default, aten._local_scalar_dense.default)


def _source(graph: fx.Graph, symbol: Any) -> fx.Node | None:
    """The node that read the number which `symbol` stands for."""
    for node in reversed(graph.nodes):
        val = value(node)
        if isinstance(val, SymInt | SymBool | SymFloat) and node.target in _ITEMS:
            expr = expression(val)
            if expr == symbol or expr == sympy.Eq(symbol, 1):  # a boolean is a number that may be 1
                return node
    return None


def _size(node: fx.Node, batch: sympy.Symbol) -> int | None:
    """For a size, which depends on no more than the batch size: what it is for a batch of one."""
    val = value(node)
    known = isinstance(val, SymInt) and expression(val).free_symbols <= {batch}
    return number(val, batch, 1) if known else None


def _computing(root: nn.Module, targets: list[fx.Node], batch: sympy.Symbol) -> list[fx.Node]:
    """The nodes that `targets` are computed from, in order, with those that write to what they read; sizes are leaves."""
    needed, memory, found = set(targets), set[int](), []
    for node in reversed(targets[0].graph.nodes):
        if node not in needed and memory.isdisjoint(written_memory(node)):
            continue
        found.append(node)
        if _size(node, batch) is None:
            read = [n for n in node.all_input_nodes if not is_model_of(n, node)]
            needed.update(read)
            memory.update(m for n in (node, *read) if (m := _memory(root, n)) is not None)
    return found[::-1]


def _empty(own: fx.Graph, like: Any, batch: sympy.Symbol) -> fx.Node:
    """A tensor of the shape that `like` has for a batch of one."""
    sizes = [number(n, batch, 1) for n in like.shape]
    return own.call_function(torch.empty, (sizes,), {"dtype": like.dtype, "device": like.device})


def _memory(root: nn.Module, node: fx.Node) -> int | None:
    if node.op == "get_attr":
        constant = getattr(root, str(node.target), None)
        return storage_of(constant) if isinstance(constant, Tensor) else None
    return storage(node)


def _program(
    root: nn.Module, nodes: list[fx.Node], results: list[fx.Node], batch: sympy.Symbol
) -> fx.GraphModule:
    """A program of `nodes` alone, which takes the values of all placeholders and writes to none of them."""
    own = fx.Graph()
    given = (n for n in results[0].graph.nodes if n.op == "placeholder")
    new: dict[fx.Node, Any] = {n: own.placeholder(n.name) for n in given}
    writes = any(map(written_memory, nodes))
    for node in nodes:
        if (size := _size(node, batch)) is not None:
            new[node] = size
        elif node.op != "placeholder":
            models = {n: _empty(own, value(n), batch) for n in node.all_input_nodes if is_model_of(n, node)}
            new[node] = own.node_copy(node, (new | models).__getitem__)
        if writes and node.op in ("placeholder", "get_attr"):
            new[node] = own.call_function(aten.clone.default, (new[node],))
    own.output([new[n] for n in results])
    return fx.GraphModule(root, own)
