"""What code changes of what it holds and reads, put back afterwards.

A loss may have a state: a list that it appends to, a running mean, a global. While a trace is made and checked, the loss is
called on made-up examples and on tensors without numbers, and nothing of these may stay in its state.
"""

from __future__ import annotations

import contextlib
import dis
import operator
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .names import codes_in
from .walk import Walk, walked

_SMALL = 1 << 20  # numbers of a tensor up to which a copy of it is kept: larger ones are weights

Undo = Callable[[], None]


@contextlib.contextmanager
def preserved(*code: Callable[..., Any]) -> Iterator[None]:
    """Undo at the end what the code stores into objects, containers and globals, and writes into tensors that are not large."""
    undo = [u for function in code for u in _undo(walked(function))]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _undo(walk: Walk) -> Iterator[Undo]:
    for value in walk.holders:
        if isinstance(value, FunctionType):
            yield from _of_function(value)
        for container in _containers(value):
            yield _contents(container)
    for t in (*walk.found.buffers.values(), *walk.found.loose.values()):
        if not t.requires_grad and t.numel() <= _SMALL and not t.is_inference():
            yield partial(_write_back, t, t._version, t.detach().clone())


def _containers(value: Any) -> Iterator[Any]:
    """The containers in which an object keeps what can be replaced in it."""
    if isinstance(value, dict | list | set | deque):
        yield value
    elif not isinstance(value, type | ModuleType) and isinstance(
        held := getattr(value, "__dict__", None), dict
    ):
        yield held
        if isinstance(value, nn.Module):
            yield from (value._parameters, value._buffers, value._modules)


def _contents(container: Any) -> Undo:
    before = dict(container.items()) if isinstance(container, dict) else list(container)

    def put_back() -> None:
        flat = ([*held, *held.values()] if isinstance(held, dict) else held for held in (before, container))
        if len(before) != len(container) or not all(map(operator.is_, *flat)):
            container.clear()
            container.extend(before) if isinstance(container, list | deque) else container.update(before)

    return put_back


def _of_function(function: FunctionType) -> Iterator[Undo]:
    """What a function stores into its closure, and among its globals."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield partial(setattr, cell, "cell_contents", cell.cell_contents)
    code = [i for c in codes_in(function.__code__) for i in dis.get_instructions(c)]
    stored = {i.argval for i in code if i.opname == "STORE_GLOBAL"}
    held = function.__globals__
    yield from (partial(held.__setitem__, name, held[name]) for name in stored & held.keys())


def _write_back(t: Tensor, version: int, before: Tensor) -> None:
    if t._version != version:
        with torch.no_grad():
            t.copy_(before)
