"""What code reads beside its arguments: the cells of its closure, its default arguments, and globals by their names.

Only code of the user's own is looked into: libraries do not change their globals between two calls. Of a module or an
object that code reads, only the attributes that it names count: a trainer's counter of steps leads to no new trace.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from ..base.source import is_installed

Reads = list[tuple[Any, Any]]

# what a class or an object has by name and nothing else looks into
_PLAIN = (int, float, complex, str, bytes, type(None), list, tuple, set, dict, torch.Tensor, torch.nn.Module)


class _Names(NamedTuple):
    """The names in a function's code, and in that of the functions in it."""

    code: CodeType
    every: frozenset[str]  # of globals and attributes
    of_globals: frozenset[str]  # an attribute may have the name of a global that is something else


_known: weakref.WeakKeyDictionary[FunctionType, _Names] = weakref.WeakKeyDictionary()
_own: weakref.WeakKeyDictionary[type, list[type]] = weakref.WeakKeyDictionary()
_forward: weakref.WeakKeyDictionary[type, tuple[CodeType, frozenset[str]]] = weakref.WeakKeyDictionary()


def of_function(function: FunctionType | MethodType) -> Reads:
    """What a function reads, by name; nothing for a library's."""
    if isinstance(function, MethodType):
        code, owner = function.__func__, function.__self__
        names = names_in(code) if isinstance(code, FunctionType) else frozenset[str]()
        return [("", code), *_named("self", owner, names)]
    names = names_in(function)
    if not names and not function.__closure__ and not function.__defaults__:
        return []
    found: Reads = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            found += _named(name, cell.cell_contents, names)
    for name in sorted(_names_of(function).of_globals & function.__globals__.keys()):
        found += _named(name, function.__globals__[name], names)
    return found


def of_class(kind: type) -> Reads:
    """The methods of a class, and its plain attributes; nothing for a library's."""
    if kind not in _own:
        _own[kind] = [c for c in kind.__mro__ if not is_installed(_file_of(c))]
    held = [
        (k, getattr(v, "__func__", getattr(v, "fget", v))) for c in _own[kind] for k, v in vars(c).items()
    ]
    return [
        (k, v)
        for k, v in held
        if isinstance(v, FunctionType) or (isinstance(v, (*_PLAIN, type)) and not k.startswith("__"))
    ]


def names_in_forward(kind: type) -> frozenset[str]:
    """The names in a module's forward, and in those of its methods that are named there."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, FunctionType):
        return frozenset()
    known = _forward.get(kind)
    if known is None or known[0] is not forward.__code__:
        known = _forward[kind] = forward.__code__, _methods(kind, names_in(forward))[1]
    return known[1]


def names_in_code(function: FunctionType | MethodType) -> frozenset[str]:
    """The names in a function's code, and in the methods of its object that are named there."""
    if isinstance(function, FunctionType):
        return names_in(function)
    code = function.__func__
    names = names_in(code) if isinstance(code, FunctionType) else frozenset[str]()
    return _methods(type(function.__self__), names)[1]


def of_object(value: Any, names: frozenset[str]) -> Reads:
    """The attributes and methods of an object that are named."""
    return _named("", value, names)[1:]


def _named(name: str, value: Any, names: frozenset[str]) -> Reads:
    """A value that code reads, with those of its attributes that the code names."""
    if isinstance(value, ModuleType):
        return [] if _is_installed(value) else _attributes(name, vars(value), names)
    kind = type(value)
    if isinstance(value, (*_PLAIN, type, FunctionType, MethodType)):
        return [(name, value)]
    held: dict[str, Any] = getattr(value, "__dict__", {})
    if is_installed(_file_of(kind)):  # a namespace, say
        return [(name, value), *_attributes(name, held, names)]
    methods, names = _methods(kind, names)
    of_kind = {n: v for c in reversed(kind.__mro__[:-1]) for n, v in vars(c).items()}
    slots = {n: getattr(value, n, None) for n, v in of_kind.items() if isinstance(v, MemberDescriptorType)}
    plain = {n: v for n, v in of_kind.items() if isinstance(v, _PLAIN) and n not in held}
    return [(name, value), *_attributes(name, {**plain, **slots, **held}, names), *methods]


def _attributes(name: str, held: dict[str, Any], names: frozenset[str]) -> Reads:
    return [(f"{name}.{n}", held[n]) for n in sorted(names & held.keys())]


def _methods(kind: type, names: frozenset[str]) -> tuple[Reads, frozenset[str]]:
    """The methods among the names, and the names with those in the methods' own code."""
    found: dict[str, FunctionType] = {}
    left = set(names)
    while left:
        method = getattr(kind, name := left.pop(), None)
        method = method.fget if isinstance(method, property) else method
        if isinstance(method, FunctionType) and name not in found:
            found[name] = method
            left |= names_in(method) - found.keys()
    reached = names.union(*map(names_in, found.values()))
    return [(f".{n}", found[n]) for n in sorted(found)], reached


def names_in(function: FunctionType) -> frozenset[str]:
    """The names of globals and attributes in a function's code; none for a library's."""
    return _names_of(function).every


def _names_of(function: FunctionType) -> _Names:
    code, known = function.__code__, _known.get(function)
    if known is None or known.code is not code:  # a notebook that reloads code gives a function another
        codes = [] if is_installed(code.co_filename) else list(_codes_in(code))
        every = frozenset(name for c in codes for name in c.co_names)
        known = _known[function] = _Names(code, every, frozenset(g for c in codes for g in _globals_in(c)))
    return known


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def _globals_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        # the latter in the body of a class
        if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
            yield instruction.argval


def _is_installed(module: ModuleType) -> bool:
    return module.__name__ in sys.builtin_module_names or is_installed(
        getattr(module, "__file__", None) or ""
    )


def _file_of(kind: type) -> str:
    """The file of a class; none for one that was defined at a prompt."""
    if kind.__module__ in sys.builtin_module_names:
        return "<built-in>"
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
