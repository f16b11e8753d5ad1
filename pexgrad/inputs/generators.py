"""Python's and NumPy's generators of random numbers, of which a graph would keep one draw for ever."""

from __future__ import annotations

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


def states(held: Iterable[Any]) -> list[str]:
    """The states of Python's and NumPy's own generators, and of those among some objects."""
    numpy = _numpy()
    own = [repr(random.getstate()), *([] if numpy is None else [_state(numpy.get_state())])]
    return own + [_of_generator(g) for g in held if is_generator(g)]


def _of_generator(g: Any) -> str:
    if isinstance(g, random.Random):
        return repr(g.getstate())
    if hasattr(g, "get_state"):  # a `RandomState`
        return _state(g.get_state())
    return _state(getattr(g, "bit_generator", g).state)


def _state(state: Any) -> str:
    """Words in arrays, as text that is another where any of them is."""
    if isinstance(state, dict):
        return repr({k: _state(v) for k, v in state.items()})
    if isinstance(state, tuple | list):
        return repr([_state(v) for v in state])
    return repr(state.tobytes() if hasattr(state, "tobytes") else state)
