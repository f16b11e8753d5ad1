"""The code that a function reaches: the user's functions, classes and methods that it names, and those that these name in turn.

And all names in that code, out of its bytecode (`names.py`), by which `reads.py` looks up what it reads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from .classes import function_under, is_module_installed, is_unnamed, of_class, own_members, unnamed
from .names import names_in, names_of

MANY = 1000  # items of a container that is looked at as a whole: it is data, and no setting

_forward: weakref.WeakKeyDictionary[type, tuple[CodeType, frozenset[str]]] = weakref.WeakKeyDictionary()


def forget_names() -> None:
    """Look at code anew: a function may reach others by now."""
    _forward.clear()


def names_in_forward(kind: type) -> frozenset[str]:
    """The names in a module's forward, and in the code that it reaches."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, FunctionType):
        return frozenset()
    known = _forward.get(kind)
    if known is None or known[0] is not forward.__code__:
        known = _forward[kind] = forward.__code__, reached([forward], kind)
    return known[1]


def names_in_code(function: FunctionType | MethodType) -> frozenset[str]:
    """The names in a function's code, and in the code that it reaches."""
    if isinstance(function, MethodType):
        return reached([function.__func__], type(function.__self__))
    return reached([function])


def reached(held: Iterable[Any], kind: type | None = None) -> frozenset[str]:
    """The names in the code of functions, and in that of the user's functions and classes, and methods of a class, that it names.

    Anything else that is held is left out.
    """
    return frozenset[str]().union(*map(names_in, code_from(held, kind)))


def read_in_forward(kind: type, held: Iterable[Any]) -> tuple[frozenset[str], list[tuple[str, Any]]]:
    """The names in a module's forward and in functions that it holds, and what they find: beside these and in their class."""
    functions = [*code_from([getattr(kind, "forward", None), *map(function_under, held)], kind)]
    names, members = frozenset[str]().union(*map(names_in, functions)), own_members(kind)
    found = [item for f in functions for item in beside(f)]
    return names, found + [(n, members[n]) for n in sorted(names & members.keys())]


def code_from(held: Iterable[Any], kind: type | None = None) -> Iterator[FunctionType]:
    """The functions among what is held, and the user's that they reach by name, each once; with `kind` its methods too."""
    left, seen = [*held, *(() if kind is None else unnamed(kind))], set[FunctionType]()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        yield function
        names = names_in(function)
        left += [f for _, value in beside(function) for f in _functions_of(value, names)]
        left += [] if kind is None else [function_under(getattr(kind, n, None)) for n in names]


def beside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What the user's function finds in its closure, among its globals and in modules that it imports, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    held, names = function.__globals__, names_of(function)
    yield from ((n, held[n]) for n in sorted(names.of_globals & held.keys()))
    yield from ((n, sys.modules[n]) for n in sorted(names.imported) if n in sys.modules)


def _functions_of(held: Any, names: frozenset[str]) -> list[Any]:
    """What code may call by what it names: a function, those of a class, those of a module of the user's."""
    if isinstance(held, ModuleType):
        inside = [] if is_module_installed(held) else [vars(held)[n] for n in names & vars(held).keys()]
        return [f for v in inside if not isinstance(v, ModuleType) for f in _functions_of(v, names)]
    if isinstance(held, type):
        return _methods(held, names)
    return [*map(function_under, parts_of(held))]


def parts_of(held: Any) -> Iterator[Any]:
    """A value and, at any depth, what is in it: the items of containers and namespaces, what a partial calls and passes on."""
    left, seen = [held], set[int]()
    while left:
        value = left.pop()
        yield value
        inside = _items(value)
        if inside and id(value) not in seen:
            seen.add(id(value))
            left += inside


def _items(value: Any) -> list[Any]:
    if isinstance(value, FunctionType | str | int | float):  # nearly all that there is
        return []
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, SimpleNamespace):
        return [*vars(value).values()]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        with contextlib.suppress(Exception):  # a class of the user's may refuse to be gone through
            if len(value) <= MANY:
                return [*value, *value.values()] if isinstance(value, dict) else [*value]
    return []


_MAKES = ("__init__", "__new__", "__post_init__")


def _methods(kind: type, names: frozenset[str]) -> list[FunctionType]:
    """The methods of a user's class that are called by these names, or without one, and by one another."""
    left = {n: f for n, f in of_class(kind) if isinstance(f, FunctionType)}
    found: list[FunctionType] = []
    called = set(names)
    while now := [n for n in left if n in called or n in _MAKES or is_unnamed(n)]:
        found += (methods := [left.pop(n) for n in now])
        called.update(*map(names_in, methods))
    return found
