"""The model's own code, run once before it is traced.

What it keeps outside of itself (a mask behind `lru_cache`, a table of angles in a global dict) is then made of numbers,
which a trace takes as they are, and not of the fake tensors that a trace works with. And it shows how the code draws random
numbers: a graph draws from torch's generators on and on, whatever seeds or draws of Python's own came before each.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch

from ..base import trees
from ..base.fakes import TRACING
from ..base.modes import in_this_thread
from ..base.still import StandStill
from ..errors import ANY_MODEL, TraceError
from ..inputs.call import Call
from ..inputs.generators import States
from ..inputs.rebind import Bound
from .trace import Trace


def rehearsed(model: Bound, call: Call, tracing: Callable[[], Trace]) -> Trace:
    """What `tracing()` gives, or an error where a graph would draw other random numbers than the model does."""
    before = States(call.module.references)
    with TRACING, _seeding_refused():
        traced = _with_known_generators(_rehearse(model, call), tracing)
    # another thread may have drawn some
    if before.have_changed() and all(_draws_with_python(model, call) for _ in range(2)):
        before.restore()
        raise TraceError(
            "the model draws from Python's or NumPy's random numbers, of which a graph would keep one draw for ever; draw with "
            f"torch and choose with torch.where, or {ANY_MODEL}"
        )
    return traced


def _rehearse(model: Bound, call: Call) -> list[torch.Generator] | None:
    """Run the model on the first example; the generators that it drew from, or None where it does not take one example."""
    for gradients in (torch.no_grad, torch.enable_grad):  # which a model that takes derivatives fails without
        params = {k: p.detach().clone() for k, p in call.params.items()}
        noting = _Noting()
        with noting, gradients(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model.run(params, trees.examples(call.x, 0, 1))
            except TraceError:
                raise
            except Exception:  # noqa: BLE001 - what the model itself fails of will be seen on the whole batch
                continue
        return noting.generators
    return None


class _Noting(StandStill):
    """Notes the generators that random operations are given."""

    def __init__(self) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (*args, *(kwargs or {}).values())
        self.generators += [v for v in found if isinstance(v, torch.Generator)]
        return super().__torch_dispatch__(func, types, args, kwargs)


def _with_known_generators(known: list[torch.Generator] | None, tracing: Callable[[], Trace]) -> Trace:
    """Refuse a trace that draws from generators which the model made, or seeded, after the rehearsal.

    torch wraps one generator in several objects, so it is known by its state: a trace draws nothing from it.
    """
    if known is None:
        return tracing()
    before = [g.get_state() for g in known]
    for g in known:
        torch.rand(1, generator=g, device=g.device)
    marks = [g.get_state() for g in known]
    try:
        traced = tracing()
        for g in traced.generators():
            if not any(torch.equal(g.get_state(), mark) for mark in marks):
                _refuse_seeding()
        return traced
    finally:
        for g, state in zip(known, before, strict=True):
            g.set_state(state)


@contextlib.contextmanager
def _seeding_refused() -> Iterator[None]:
    manual_seed = in_this_thread(_refuse_seeding, torch.manual_seed)
    with (
        mock.patch.object(torch, "manual_seed", manual_seed),
        mock.patch.object(torch.random, "manual_seed", manual_seed),
    ):
        yield


def _refuse_seeding(*_: Any, **__: Any) -> NoReturn:
    raise TraceError(
        "the model seeds random numbers in its forward, or makes a generator there, which a graph does not repeat: it would "
        f"draw on and on; do that outside, or {ANY_MODEL}"
    )


def _draws_with_python(model: Bound, call: Call) -> bool:
    before = States(call.module.references)
    _rehearse(model, call)
    return before.have_changed()
