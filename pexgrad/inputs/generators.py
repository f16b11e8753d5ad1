"""Python's and NumPy's generators of random numbers, of which a graph would keep one draw for ever."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable
from typing import Any


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
        return any(_text(_read(g)) != _text(state) for g, state in self._before)

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """As if nothing had been drawn."""
        for g, state in self._before:
            _write(g, state)


def _read(g: Any) -> Any:
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


def _text(state: Any) -> str:
    """A text that is another where any word of a state is, those in arrays included."""
    if isinstance(state, dict):
        return repr({k: _text(v) for k, v in state.items()})
    if isinstance(state, tuple | list):
        return repr([_text(v) for v in state])
    return repr(state.tobytes() if hasattr(state, "tobytes") else state)
