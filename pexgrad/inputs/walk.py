"""What a model holds and its code reads, looked at anew at every call: a trace is right as long as none of it changes.

One walk meets parameters and buffers, by name, and everything else that a trace depends on: submodules, flags, settings, hooks,
functions, and all that these hold and read, at any depth. What it goes by:

    names.py      the names that a function's bytecode loads
    reached.py    the code of the user's that a function reaches by these, and all names in it
    reads.py      what names stand for: cells of a closure, defaults, globals, methods, the attributes that code names
    hooks.py      the hooks of modules
    contents.py   what is inside any other object, if anything that counts is, and what cannot change
    held.py       a tensor as it was, and whether it has changed since
    snapshot.py   what was found, to be compared with what another walk finds
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from sys import intern
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .classes import is_users, is_users_alone, of_class
from .contents import (
    ATOMS,
    BY_CONTENT,
    CONTAINERS,
    attributes_of,
    inside_of,
    interned,
    numbers_in,
    plain_attributes,
)
from .hooks import HOOKS, hooks_in, hooks_of
from .reached import names_in_code, names_in_forward, parts_of
from .reads import attribute_names
from .snapshot import END, Snapshot

NamesFor = Callable[[Any], frozenset[str]]  # an object -> the names in the code that may read it


# lists that a recurrent layer keeps of its parameters: whoever replaces these makes new ones
_OF_WEIGHTS = ("_flat_weights", "_flat_weight_refs")


def _no_names(_: Any) -> frozenset[str]:
    return frozenset()


def snapshot(model: Callable[..., Any]) -> Snapshot:
    """What a module, a function or any other callable holds and reads."""
    return walked(model).found


def held_by(value: Any) -> list[Any]:
    """An object that a call meets, what is in it, at any depth of the user's objects, and the code of its own class."""
    walk = Walk()

    def names(held: Any) -> frozenset[str]:
        return attribute_names(held) if held is value or is_users(type(held)) else frozenset()

    walk.values([("", value), *of_class(type(value))], names)
    return [*walk.found.references, *walk.found.loose.values()]


def walked(model: Callable[..., Any], around: Iterable[nn.Module] = ()) -> Walk:
    """The walk through a module, a function or any other callable; it does not enter the modules in `around`."""
    walk = Walk(around)
    if isinstance(model, nn.Module):
        walk.modules(model, named=True)
    else:
        of_object = isinstance(getattr(model, "__call__", None), MethodType)  # noqa: B004 - its code is what is read
        walk.values([("", model.__call__ if of_object else model)])
    return walk


class Walk:
    """One walk, on which everything leaves a mark: two that leave the same have found the same in the same places."""

    def __init__(self, around: Iterable[nn.Module] = ()) -> None:
        self.found = Snapshot({}, {}, [], {})
        self.holders: list[Any] = []  # modules, objects, containers and functions that have been looked into
        self._marks = self.found.references
        self._seen: set[Any] = set(map(id, around))
        self._reached: dict[Any, frozenset[str]] = {}  # names, by class and the names that code reads it by
        self._tensors: dict[int, int] = {}  # the number of each, in the order in which they were met
        self._with_attributes: list[Tensor] = []  # parameters and buffers that somebody has given some

    def modules(self, root: nn.Module, *, named: bool) -> None:
        """A module and those in it; parameters and buffers by name, or as loose tensors."""
        modules: list[nn.Module] = []
        self._tree(root, "", modules, named=named)
        self.holders += modules
        names = _looked_up_once(lambda: _names_in(modules))  # one module may hold what another is given
        for m in modules:
            self.values(((k, v) for k, v in plain_attributes(m).items() if k not in _OF_WEIGHTS), names)
            for hooks in HOOKS:
                if vars(m).get(hooks):
                    self._marks.append(hooks)
                    self.values(hooks_of(vars(m), hooks), names)
            if id(kind := type(m)) not in self._seen:
                self._seen.add(id(kind))
                self.values(of_class(kind), names)
            self._marks.append(END)
        while self._with_attributes:
            t = self._with_attributes.pop()
            self.values(((k, v) for k, v in t.__dict__.items() if k in names(t)), names)
            self._marks.append(END)

    def _tree(self, m: nn.Module, prefix: str, modules: list[nn.Module], *, named: bool) -> None:
        self._marks += (m, type(m))
        if id(m) in self._seen:  # its attributes follow, or have been
            return
        self._seen.add(id(m))
        modules.append(m)
        for own, into in ((m._parameters, self.found.parameters), (m._buffers, self.found.buffers)):
            for name, t in own.items():
                self._marks.append(intern(str(name)))
                if t is None:
                    self._marks.append(None)
                elif named and id(t) not in self._tensors:
                    self._tensors[id(t)] = len(self._tensors)
                    into[prefix + name] = t
                else:
                    self._tensor(t)
                if t is not None and t.__dict__:
                    self._with_attributes.append(t)
        for name, child in m._modules.items():
            self._marks.append(intern(str(name)))
            if child is None:
                self._marks.append(None)
            else:
                self._tree(child, f"{prefix}{name}.", modules, named=named)
        self._marks.append(END)

    def _tensor(self, t: Tensor) -> None:
        """A loose tensor, and for one that has been met before which it is."""
        if (known := self._tensors.get(id(t))) is not None:
            self._marks.append(interned(known))
            return
        self._tensors[id(t)] = len(self._tensors)
        self.found.loose[len(self._marks)] = t
        self._marks.append(Tensor)

    def values(self, items: Iterable[tuple[Any, Any]], names: NamesFor = _no_names) -> None:
        """What is held or read, and what containers, settings, modules and code among it hold and read in turn.

        Of any other object, the attributes that the code names. A container is what is in it: `torch.func.functional_call` gives
        a recurrent layer new lists of the same weights.
        """
        for key, value in items:
            if type(key) is str:
                self._marks.append(intern(key))
            kind = type(value)
            if kind is weakref.ReferenceType:
                value = value()
                kind = type(value)
            if kind in ATOMS:
                self._marks += (kind, interned(value)) if kind is str else (interned(value),)
            elif isinstance(value, Tensor):
                self._tensor(value)
            elif id(value) in self._seen:
                self._marks.append(value)
            elif isinstance(value, nn.Module):
                self.modules(value, named=False)
            elif (numbers := numbers_in(value)) is not None:
                self._marks.append(interned(numbers))
            elif (inside := inside_of(value)) is None:
                self._object(value, names)
            else:
                self._container(value, inside, names)

    def _object(self, value: Any, names: NamesFor) -> None:
        """An object, and those of its attributes that the code names."""
        kind, own = type(value), names(value)
        self._marks += (value, kind)
        self.holders.append(value)
        # other code may read other attributes of it
        if (own or is_users(kind)) and (id(value), own) not in self._seen:
            self._seen.add((id(value), own))
            held, further = attributes_of(value, own)
            self.values(held, functools.partial(_either, names, further))
            self._marks.append(END)

    def _container(self, value: Any, inside: list[tuple[Any, Any]], names: NamesFor) -> None:
        """A container, settings or code, and what is in it."""
        kind = type(value)
        self._seen.add(id(value))
        self.holders.append(value)
        if kind is FunctionType:
            self._marks.append(value.__code__)
            if vars(value):  # attributes of a function
                own = names(value) | names_in_code(value)
                inside = [*inside, *((k, v) for k, v in vars(value).items() if k in own)]
        by_content = isinstance(value, BY_CONTENT) or is_users_alone(kind)
        self._marks.append(kind if by_content else value)
        if isinstance(value, FunctionType | MethodType):
            names = _looked_up_once(functools.partial(names_in_code, value))
        elif isinstance(value, functools.partial):  # what it gives to its function
            names = functools.partial(_either, names, _names_in_functions(value))
        elif is_users(kind):
            held, further = self._read_by_methods(value, names(value))
            inside, names = [*inside, *held], functools.partial(_either, names, further)
        self.values(inside, names)
        self._marks.append(END)

    def _read_by_methods(
        self, value: Any, own: frozenset[str]
    ) -> tuple[list[tuple[Any, Any]], frozenset[str]]:
        """What the methods and properties of a container or of settings read, and the names that are reached through them.

        Settings of one class have the same methods: once is enough.
        """
        key = type(value), own
        if key in self._reached and not isinstance(value, CONTAINERS):
            return [], self._reached[key]
        held, self._reached[key] = attributes_of(value, own)
        return held, self._reached[key]


def _looked_up_once(names: Callable[[], frozenset[str]]) -> NamesFor:
    """Names that are the same for every object, and are not looked up where there is no object."""
    known = functools.cache(names)
    return lambda _: known()


def _names_in(modules: list[nn.Module]) -> frozenset[str]:
    """The names in all code of modules: their forwards, functions that they hold, hooks."""
    held = [f for m in modules for f in (*plain_attributes(m).values(), *hooks_in(m))]
    return _names_in_functions(held).union(*map(names_in_forward, set(map(type, modules))))


def _names_in_functions(held: Any) -> frozenset[str]:
    """The names in the code of all functions in it."""
    code = [f for f in parts_of(held) if isinstance(f, FunctionType | MethodType)]
    return frozenset[str]().union(*map(names_in_code, code))


def _either(names: NamesFor, further: frozenset[str], value: Any) -> frozenset[str]:
    return names(value) | further
