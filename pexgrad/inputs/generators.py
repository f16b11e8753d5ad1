"""Python's and NumPy's generators of random numbers, of which a graph would keep one draw for ever."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Iterable
from typing import Any

from ..errors import ANY_MODEL, TraceError


def _numpy() -> Any:
    """NumPy's, where it is in use."""
    return getattr(sys.modules.get("numpy"), "random", None)


def is_generator(value: Any) -> bool:
    """Whether an object is one of them."""
    numpy = _numpy()
    return isinstance(value, random.Random) or (
        numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState | numpy.BitGenerator)
    )


class States(contextlib.AbstractContextManager[None]):
    """The states of Python's and NumPy's own generators, and of those among some objects, as they are now.

    As a context it restores them at its end.
    """

    def __init__(self, held: Iterable[Any]):
        own = [random, *([] if (numpy := _numpy()) is None else [numpy])]
        self._before = [(g, _read(g)) for g in (*own, *filter(is_generator, held))]

    def have_changed(self) -> bool:
        """Whether any has been drawn from since."""
        # as bytes, which hold every word of a state, those in arrays included
        return any(pickle.dumps(_read(g)) != pickle.dumps(state) for g, state in self._before)

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """As if nothing had been drawn."""
        for g, state in self._before:
            _write(g, state)


def _read(g: Any) -> Any:
    if isinstance(g, random.SystemRandom):  # has no state
        raise TraceError(
            "the model holds a random.SystemRandom, of which cannot be told whether the forward draws from it, and a graph would "
            f"keep one draw for ever; hold a random.Random, or {ANY_MODEL}"
        )
    if hasattr(g, "getstate"):  # Python's
        return g.getstate()
    if hasattr(g, "get_state"):  # NumPy's of old
        return g.get_state()
    return getattr(g, "bit_generator", g).state


def _write(g: Any, state: Any) -> None:
    if hasattr(g, "setstate"):
        g.setstate(state)
    elif hasattr(g, "set_state"):
        g.set_state(state)
    else:
        getattr(g, "bit_generator", g).state = state
