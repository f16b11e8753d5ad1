"""Fake tensors for tracing: shapes without numbers, in which the batch size may be symbolic.

What all recordings of graphs share: those of a model, a loss, an opaque function and a whole call.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from . import shapes
from .fake_results import plain_result

# The batch size that tracing pretends to see. Not 0, 1 or 2, which code and kernels treat specially;
# collisions with other sizes do no harm, for only the batch is symbolic.
HINT = 13

# one for all: torch keeps the state of a trace, symbolic sizes included, for the whole process
TRACING = threading.RLock()

# torch's own shape functions ask for sizes to compute the metadata of fake tensors
_METADATA = (
    shapes.__file__,
    *(
        os.path.join(os.sep + "torch", part)
        for part in ("_subclasses", "_prims_common", "_prims", "_refs", "_meta_registrations.py", "_decomp")
    ),
)


def computes_metadata(filename: str) -> bool:
    """Whether code of this file only works out the metadata of fake tensors, on which no graph depends."""
    return any(part in filename for part in _METADATA)


_hushed = threading.local()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not getattr(_hushed, "depth", 0))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's log of shapes that do not fit, in this thread: the error says so, or there is another way."""
    _hushed.depth = getattr(_hushed, "depth", 0) + 1
    try:
        yield
    finally:
        _hushed.depth -= 1


def is_recorded(x: Tensor) -> bool:
    """Whether the run is being written down as a graph, in which no shape can depend on data."""
    return isinstance(x, FakeTensor)


# code between a question about a size and who asks it
_BETWEEN = tuple(
    os.path.join(os.path.dirname(torch.__file__), part)
    for part in (
        "__init__.py", "_compile.py", "_dynamo/eval_frame.py", "_higher_order_ops", "_library/custom_ops.py",
        "_library/fake_impl.py", "_logging", "_subclasses/fake_tensor.py", "_subclasses/meta_utils.py", "fx/_symbolic_trace.py",
        "fx/experimental/recording.py", "fx/experimental/sym_node.py", "fx/experimental/symbolic_shapes.py", "fx/interpreter.py",
    )
)  # fmt: skip


class _Sizes(ShapeEnv):
    """Symbolic sizes that know who asked: torch would load all of `torch.export` to tell."""

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        asked = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        return super()._get_stack_summary(is_debug, framework_loc or asked)  # pyright: ignore[reportArgumentType]


def symbolic_mode() -> tuple[FakeTensorMode, ShapeEnv]:
    """A mode of symbolic sizes, which may be 0 or 1 and share a symbol where they are equal; and its guards.

    It is torch's class with a method replaced: for a subclass `torch.while_loop` and its like would have no rule.
    """
    env = _Sizes(duck_shape=True, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # to look a symbolic shape up there takes longer than to work most out
    dispatch = mode.dispatch

    def plainly(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = plain_result(func, args, kwargs)
        return dispatch(func, types, args, kwargs) if plain is None else plain

    mode.dispatch = plainly
    return mode, env


@dataclass(frozen=True, eq=False)
class Guards:
    """What a recording takes for granted of the batch size."""

    batch: Any  # its symbol
    conditions: tuple[Any, ...]
    _known: dict[int, bool] = field(default_factory=dict)

    def hold(self, batch: int) -> bool:
        """Whether the code goes the same way for a batch of that size."""
        if batch not in self._known:
            self._known[batch] = all(bool(g.subs(self.batch, batch)) for g in self.conditions)
        return self._known[batch]


def fake(mode: FakeTensorMode, t: Tensor) -> Tensor:
    """`t` without its numbers, all of its sizes fixed."""
    return mode.from_tensor(t.detach(), static_shapes=True)


def fake_batch(mode: FakeTensorMode, t: Tensor, batch: int = HINT, *, fixed: bool = False) -> Tensor:
    """`t` (b, ...) without its numbers, for another batch size, its examples one after the other in memory."""
    # strided like the user's tensor in everything but the batch, so that channels_last stays channels_last
    like = t.detach()[:1].expand(batch, *t.shape[1:]) if t.shape[0] else t.new_empty((batch, *t.shape[1:]))
    like = torch.empty_like(like, device=t.device)
    dynamic = [DimDynamic.STATIC if fixed else DimDynamic.DUCK] + [DimDynamic.STATIC] * (t.dim() - 1)
    return mode.from_tensor(like, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))


def symbolic_len() -> AbstractContextManager[Any]:
    """`len(x)` of a traced tensor is its symbolic size: C's `len` would fix the batch size in the graph."""
    plain_len = builtins.len

    def length(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
            return value.shape[0]
        return plain_len(value)

    return mock.patch.object(builtins, "len", length)
