"""What code reads beside its arguments: the cells of its closure, its default arguments, and globals by their names.

It goes in two steps. First all names are collected, out of the bytecode of a function and of every function, class and method of
the user's that it reaches (`reached`, over `_code_from`). Then they are looked up: in cells, defaults and globals (`_beside`),
and among the attributes of each object that is found there (`_named`).

Only code of the user's own is looked into: libraries do not change their globals between two calls. Of a module or an
object that code reads, only the attributes that it names count: a trainer's counter of steps leads to no new trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ..base.source import is_installed
from .names import names_in, names_of

Reads = list[tuple[Any, Any]]

MANY = 1000  # items of a container that is looked at as a whole: it is data, and no setting

# what a class or an object has by name and nothing else looks into
_PLAIN = (int, float, complex, str, bytes, type(None), list, tuple, set, dict, torch.Tensor, torch.nn.Module)


_own: weakref.WeakKeyDictionary[type, list[type]] = weakref.WeakKeyDictionary()
_forward: weakref.WeakKeyDictionary[type, tuple[CodeType, frozenset[str]]] = weakref.WeakKeyDictionary()


def of_function(function: FunctionType | MethodType) -> Reads:
    """What a function reads, by name; nothing for a library's."""
    if isinstance(function, MethodType):
        code, owner = function.__func__, function.__self__
        return [("", code), *_named("self", owner, reached([code]))]
    if not names_in(function) and not function.__closure__ and not function.__defaults__:
        return []
    names = reached([function])
    found: Reads = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for name, held in _beside(function):
        found += _named(name, held, names)
    return found


def of_class(kind: type) -> Reads:
    """The methods and attributes of a class; nothing for a library's."""
    held = [(k, _function(v)) for c in _own_bases(kind) for k, v in vars(c).items()]
    return [
        (k, v)
        for k, v in held
        if isinstance(v, FunctionType) or not (k.startswith("__") or isinstance(v, MemberDescriptorType))
    ]


def functions_of_class(kind: type) -> list[tuple[str, FunctionType]]:
    """The methods of a user's class that find something in their closures or defaults, each by its name."""
    found = {n: f for c in reversed(_own_bases(kind)) for n, f in vars(c).items()}
    return [
        (n, f)
        for n, f in found.items()
        if isinstance(f, FunctionType) and (f.__closure__ or f.__defaults__ or f.__kwdefaults__)
    ]


def reaches(kind: type, held: Iterable[Any], own: set[int]) -> bool:
    """Whether the methods of a module's class, or functions that it holds, find any of these objects among their globals."""
    for function in _code_from([*(f for _, f in of_class(kind)), *map(_function, held)]):
        for _, value in _among_globals(function):
            inside = value.values() if isinstance(value, dict) else value
            among = inside if isinstance(value, dict | list | tuple) and len(value) <= MANY else ()
            if any(id(v) in own for v in (value, *among)):
                return True
    return False


def read_in_forward(kind: type, held: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """What a module's forward, and functions that it holds, find by name: in closures, among globals and in their class."""
    names = set[str]()
    for function in _code_from([getattr(kind, "forward", None), *map(_function, held)], kind):
        names |= names_in(function)
        yield from _beside(function)
    of_class = {n: v for c in reversed(_own_bases(kind)) for n, v in vars(c).items()}
    yield from ((n, of_class[n]) for n in names & of_class.keys())


def names_in_forward(kind: type) -> frozenset[str]:
    """The names in a module's forward, and in the code that it reaches."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, FunctionType):
        return frozenset()
    known = _forward.get(kind)
    if known is None or known[0] is not forward.__code__:
        known = _forward[kind] = forward.__code__, reached([forward], kind)
    return known[1]


def forget_names() -> None:
    """Look at code anew: a function may reach others by now."""
    _forward.clear()


def names_in_code(function: FunctionType | MethodType) -> frozenset[str]:
    """The names in a function's code, and in the code that it reaches."""
    if isinstance(function, MethodType):
        return reached([function.__func__], type(function.__self__))
    return reached([function])


def reached(held: Iterable[Any], kind: type | None = None) -> frozenset[str]:
    """The names in the code of functions, and in that of the user's functions and classes, and methods of a class, that it names.

    Anything else that is held is left out.
    """
    return frozenset[str]().union(*map(names_in, _code_from(held, kind)))


def _code_from(held: Iterable[Any], kind: type | None = None) -> Iterator[FunctionType]:
    """The functions among what is held, and the user's that they reach by name, each once; with `kind` its methods too."""
    left, seen = [*held, *(() if kind is None else _unnamed(kind))], set[FunctionType]()
    while left:
        function = left.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        yield function
        names = names_in(function)
        left += [f for _, value in _beside(function) for f in _functions_of(value, names)]
        left += [] if kind is None else [_function(getattr(kind, n, None)) for n in names]


def _beside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What the user's function finds in its closure and among its globals, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    yield from _among_globals(function)


def _among_globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in sorted(names_of(function).of_globals & function.__globals__.keys()):
        yield name, function.__globals__[name]


def _functions_of(held: Any, names: frozenset[str]) -> list[Any]:
    """What code may call by what it names: a function, those of a class, those of a module of the user's."""
    if isinstance(held, ModuleType):
        inside = [] if _is_installed(held) else [vars(held)[n] for n in names & vars(held).keys()]
        return [f for v in inside if not isinstance(v, ModuleType) for f in _functions_of(v, names)]
    if isinstance(held, type):
        return _methods(held, names)
    return [*map(_function, parts_of(held))]


def parts_of(held: Any) -> Iterator[Any]:
    """What is in containers and namespaces, at any depth, and what a partial calls and gives on; anything else as it is."""
    left, seen = [held], set[int]()
    while left:
        value = left.pop()
        inside = _items(value)
        if inside is None:
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            left += inside


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, FunctionType | str | int | float):  # nearly all that there is
        return None
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, SimpleNamespace):
        return [*vars(value).values()]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        with contextlib.suppress(Exception):  # a class of the user's may refuse to be gone through
            return [*(value.values() if isinstance(value, dict) else value)] if len(value) <= MANY else []
    return None


def _methods(kind: type, names: frozenset[str]) -> list[FunctionType]:
    """The methods of a user's class that are called by these names, or without one, and by one another."""
    left = {n: f for n, f in of_class(kind) if isinstance(f, FunctionType)}
    found: list[FunctionType] = []
    called = set(names)
    while now := [n for n in left if n in called or n in _MAKES or _is_unnamed(n)]:
        found += (methods := [left.pop(n) for n in now])
        called.update(*map(names_in, methods))
    return found


def _function(held: Any) -> Any:
    """The function under a method or a property; anything else as it is."""
    if isinstance(held, property):
        return held.fget
    if isinstance(held, cached_property):
        return held.func
    return held.__func__ if isinstance(held, MethodType | classmethod | staticmethod) else held


# special methods that no syntax calls while a model runs
_APART = frozenset({
    "__init__", "__new__", "__del__", "__repr__", "__str__", "__format__", "__hash__", "__init_subclass__", "__class_getitem__",
    "__set_name__", "__subclasshook__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__",
    "__getnewargs_ex__", "__copy__", "__deepcopy__", "__dir__", "__sizeof__",
})  # fmt: skip


_MAKES = ("__init__", "__new__", "__post_init__")


def _is_unnamed(name: str) -> bool:
    return name.startswith("__") and name not in _APART


def _unnamed(kind: type) -> list[FunctionType]:
    """The special methods of a user's class, which code calls without a name: `table[i]`, `with scale:`, `op(x)`."""
    return [f for n, f in of_class(kind) if isinstance(f, FunctionType) and _is_unnamed(n)]


def is_users(kind: type) -> bool:
    """Whether a class is of the user's own program, as one is that was defined at a prompt."""
    module = sys.modules.get(kind.__module__)
    return module is None or not _is_installed(module)


def is_users_alone(kind: type) -> bool:
    """Whether all code of a class is, so that its objects hold nothing that cannot be seen."""
    return len(_own_bases(kind)) == len(kind.__mro__) - 1


def _own_bases(kind: type) -> list[type]:
    """The class and its bases, as far as they are the user's."""
    if kind not in _own:
        _own[kind] = [c for c in kind.__mro__ if is_users(c)]
    return _own[kind]


def of_object(value: Any, names: frozenset[str]) -> tuple[Reads, frozenset[str]]:
    """The attributes and methods of an object that are named, and the names that are reached through it."""
    if isinstance(value, ModuleType):
        return ([] if _is_installed(value) else _attributes("", vars(value), names)), frozenset()
    return _inside("", value, names)


def attribute_names(value: Any) -> frozenset[str]:
    """All attributes that an object has by itself."""
    slots = (
        n for c in type(value).__mro__ for n, v in vars(c).items() if isinstance(v, MemberDescriptorType)
    )
    return frozenset([*getattr(value, "__dict__", ()), *slots])


def _named(name: str, value: Any, names: frozenset[str]) -> Reads:
    """A value that code reads, with those of its attributes that the code names."""
    if isinstance(value, ModuleType):
        return [] if _is_installed(value) else [(name, value)]  # what is in it is looked up by its names
    return [(name, value), *_inside(name, value, names)[0]]


def _inside(name: str, value: Any, names: frozenset[str]) -> tuple[Reads, frozenset[str]]:
    kind = type(value)
    has_more = isinstance(value, list | tuple | set | dict) and is_users(kind)
    if isinstance(value, (*_PLAIN, type, FunctionType, MethodType)) and not has_more:
        return [], names
    methods, names = _names_of_methods(kind, names)
    of_kind = {n: v for c in reversed(kind.__mro__[:-1]) for n, v in vars(c).items() if n in names}
    held: dict[str, Any] = {}
    for n, v in of_kind.items():
        if isinstance(v, MemberDescriptorType):
            held[n] = getattr(value, n, None)
        elif is_users(kind) and not isinstance(f := _function(v), FunctionType):
            held[n] = f  # none of a namespace's, say
    return [*_attributes(name, held | getattr(value, "__dict__", {}), names), *methods], names


def _attributes(name: str, held: dict[str, Any], names: frozenset[str]) -> Reads:
    return [(f"{name}.{n}", held[n]) for n in sorted(names & held.keys())]


def _names_of_methods(kind: type, names: frozenset[str]) -> tuple[Reads, frozenset[str]]:
    """The methods of a user's class that code calls, by these names or without one, and all names that are reached there."""
    if not is_users(kind):
        return [], names
    every = names | reached((_function(getattr(kind, n, None)) for n in names), kind)
    methods = {
        n: f for n in sorted(every) if isinstance(f := _function(getattr(kind, n, None)), FunctionType)
    }
    methods |= {f.__name__: f for f in _unnamed(kind)}
    return [(f".{n}", f) for n, f in methods.items()], every


def _is_installed(module: Any) -> bool:
    """Whether a module, or what stands for one in `sys.modules`, is Python's or a library's."""
    name, file = (getattr(module, key, None) or "" for key in ("__name__", "__file__"))
    return name in sys.builtin_module_names or is_installed(file)
