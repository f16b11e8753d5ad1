"""What code reads beside its arguments: the cells of its closure, its default arguments, and globals by their names.

In two steps. First all names are collected from the bytecode of a function, and of every function, class and method of the
user's that it reaches (`reached.py`). Then they are looked up: in cells, defaults and globals (`beside`), and among the
attributes of each object that is found there (`_named`).

Only code of the user's own is looked into: libraries do not change their globals between two calls. Of a module or an
object that code reads, only the attributes that it names count: a trainer's counter of steps leads to no new trace.
"""

from __future__ import annotations

from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from .classes import Reads, function_under, holds_values, is_module_installed, is_users, unnamed
from .names import names_in
from .reached import beside, reached

# what a class or an object has by name and nothing else looks into
_PLAIN = (int, float, complex, str, bytes, type(None), list, tuple, set, dict, torch.Tensor, torch.nn.Module)


def of_function(function: FunctionType | MethodType) -> Reads:
    """What a function reads, by name; nothing for a library's."""
    if isinstance(function, MethodType):
        code, owner = function.__func__, function.__self__
        return [("", code), *_named("self", owner, reached([code]))]
    if not names_in(function) and not holds_values(function):
        return []
    names = reached([function])
    found: Reads = [*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    for name, held in beside(function):
        found += _named(name, held, names)
    return found


def of_object(value: Any, names: frozenset[str]) -> tuple[Reads, frozenset[str]]:
    """The attributes and methods of an object that are named, and the names that are reached through it."""
    if isinstance(value, ModuleType):
        return ([] if is_module_installed(value) else _attributes("", vars(value), names)), frozenset()
    return _inside("", value, names)


def attribute_names(value: Any) -> frozenset[str]:
    """All attributes that an object has by itself."""
    slots = (
        n for c in type(value).__mro__ for n, v in vars(c).items() if isinstance(v, MemberDescriptorType)
    )
    return frozenset([*getattr(value, "__dict__", ()), *slots])


def _named(name: str, value: Any, names: frozenset[str]) -> Reads:
    """A value that code reads, with those of its attributes that the code names."""
    if isinstance(value, ModuleType):  # what is in it is looked up by its names
        return [] if is_module_installed(value) else [(name, value)]
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
        elif is_users(kind) and not isinstance(f := function_under(v), FunctionType):
            held[n] = f  # none of a namespace's, say
    return [*_attributes(name, held | getattr(value, "__dict__", {}), names), *methods], names


def _attributes(name: str, held: dict[str, Any], names: frozenset[str]) -> Reads:
    return [(f"{name}.{n}", held[n]) for n in sorted(names & held.keys())]


def _names_of_methods(kind: type, names: frozenset[str]) -> tuple[Reads, frozenset[str]]:
    """The methods of a user's class that code calls, by these names or without one, and all names that are reached there."""
    if not is_users(kind):
        return [], names
    every = names | reached((function_under(getattr(kind, n, None)) for n in names), kind)
    methods = {
        n: f for n in sorted(every) if isinstance(f := function_under(getattr(kind, n, None)), FunctionType)
    }
    methods |= {f.__name__: f for f in unnamed(kind)}
    return [(f".{n}", f) for n, f in methods.items()], every
