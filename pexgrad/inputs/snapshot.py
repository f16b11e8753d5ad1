"""What a model holds and its code reads, looked at anew at every call: a trace is right as long as none of it changes.

A module holds parameters and buffers, by name, and everything else that a trace depends on: submodules, flags, settings and
hooks, at any depth of containers and settings objects. What code reads beside its arguments is in `reads.py`.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, WindowsPath
from sys import intern
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .reads import (
    MANY,
    attribute_names,
    is_users,
    is_users_alone,
    names_in_code,
    names_in_forward,
    of_class,
    of_function,
    of_object,
)

Place = int  # of a tensor: how many marks were left before it
Names = Callable[[Any], frozenset[str]]  # in the code that may read an object


class Snapshot(NamedTuple):
    """What a model holds at one moment, from one walk through it."""

    parameters: dict[str, Tensor]  # by the names of named_parameters(); a tied one once
    buffers: dict[str, Tensor]
    # a mark for everything that a trace depends on, behind its name: an object itself, or its type. They are compared by
    # identity, so whoever keeps a fingerprint keeps these too: an object that is alive shares its identity with no other.
    references: list[Any]
    loose: dict[Place, Tensor]  # tensors in attributes, containers, closures and globals

    def same(self, other: Snapshot | None) -> bool:
        """Whether another snapshot found the same objects, tensors included."""
        mine, theirs = self._objects(), [] if other is None else other._objects()
        return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))

    def same_but(self, other: Snapshot, *numbers: type) -> bool:
        """Whether another snapshot found the same but for tensors, and numbers of these types: a coefficient that grows, say."""
        mine, theirs = (
            [r for r in s.references if type(r) is bool or not isinstance(r, numbers)] for s in (self, other)
        )
        return len(mine) == len(theirs) and all(
            a is b or (type(a) is type(b) and type(a) in ATOMS and a == b)
            for a, b in zip(mine, theirs, strict=True)
        )

    def is_code(self) -> bool:
        """Whether nothing but functions was found: no number, container or object that may be another later."""
        held = self.parameters or self.buffers or self.loose
        # a name is a string; before one that is a value stands its type
        code = (FunctionType, CodeType, str)
        return not held and all(r is _END or r is FunctionType or type(r) in code for r in self.references)

    def _objects(self) -> list[Any]:
        return [
            *self.references, *self.parameters.values(), *self.buffers.values(), *self.loose.values(),
        ]  # fmt: skip

    def fingerprint(self) -> tuple[int, ...]:
        """The identities of the references."""
        return tuple(map(id, self.references))

    def places(self, tensors: Iterable[Tensor]) -> dict[Place, Held]:
        """Those of the loose tensors that are among these."""
        wanted = set(map(id, tensors))
        return {place: Held(t, _outline(t)) for place, t in self.loose.items() if id(t) in wanted}

    def contents(self) -> dict[Place, Held]:
        """All loose tensors, as they are now."""
        return {place: _as_it_is(t) for place, t in self.loose.items()}

    def values(self) -> list[Held]:
        """All tensors that are no parameters, as they are now."""
        return [*map(_as_it_is, (*self.loose.values(), *self.buffers.values()))]

    def holds(self, places: Mapping[Place, Held], *, numbers: bool = True) -> bool:
        """Whether each of the tensors is still in its place, and as it was, with or without its numbers."""
        return all(
            self.loose.get(place) is held.tensor and held.is_same(numbers) for place, held in places.items()
        )


class Held(NamedTuple):
    """A tensor as it was; where that matters, also how often it had been changed in place, and what was in it.

    The latter for a few numbers: what is written by way of `.data`, or into an array of NumPy's in the same memory, counts as no
    change.
    """

    tensor: Tensor
    outline: Any
    version: int | None = None
    numbers: bytes | None = None

    def is_same(self, numbers: bool) -> bool:
        """Whether it has not been changed since, its numbers included or not."""
        if self.outline != _outline(self.tensor):
            return False
        same = self.version in (None, _version(self.tensor)) and self.numbers in (None, _numbers(self.tensor))
        return same or not numbers


def _as_it_is(t: Tensor) -> Held:
    return Held(t, _outline(t), _version(t), _numbers(t))


def _numbers(t: Tensor) -> bytes | None:
    """The bytes of a small tensor in a CPU's memory."""
    plain = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and t.device.type == "cpu"
    if not plain or t.numel() > _FEW:
        return None
    return bytes(t.detach().reshape(-1).contiguous().view(torch.uint8).tolist())


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


# attributes that every module has: what is in them is walked through by itself
MACHINERY = frozenset(vars(nn.Module())) - {"training"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# lists that a recurrent layer keeps of its parameters: whoever replaces these makes new ones
_OF_WEIGHTS = ("_flat_weights", "_flat_weight_refs")
HOW = ("with_kwargs", "always_called")  # a hook may be called
# what nothing can be changed inside of, or nothing that is looked for
ATOMS = frozenset({
    int, float, complex, bool, str, bytes, type(None), BuiltinFunctionType, range, Fraction, Decimal, PosixPath, WindowsPath,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
})  # fmt: skip
# those of which equal ones may be several objects
_EQUAL = ATOMS - {bool, type(None), BuiltinFunctionType, torch.dtype, torch.memory_format, torch.layout}
_CODE = frozenset({FunctionType, MethodType, type})
# objects that are no more than what is in them
_TOLD = (FunctionType, MethodType, functools.partial, SimpleNamespace)
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
_END = object()
_FEW = 64  # numbers of a tensor that are looked at
_BYTES = 1 << 16  # of an array, likewise
_MOST = 1 << 16  # values that are remembered


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside what every module has."""
    return {k: v for k, v in vars(module).items() if k not in MACHINERY}


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


def walked(model: Callable[..., Any]) -> Walk:
    """The walk through a module, a function or any other callable."""
    walk = Walk()
    if isinstance(model, nn.Module):
        walk.modules(model, named=True)
    else:
        of_object = isinstance(getattr(model, "__call__", None), MethodType)  # noqa: B004 - its code is what is read
        walk.values([("", model.__call__ if of_object else model)])
    return walk


class Walk:
    """One walk, on which everything leaves a mark: two that leave the same have found the same in the same places."""

    def __init__(self) -> None:
        self.found = Snapshot({}, {}, [], {})
        self.holders: list[Any] = []  # modules, objects, containers and functions that have been looked into
        self._marks = self.found.references
        self._seen = set[Any]()
        self._tensors: dict[int, int] = {}  # the number of each, in the order in which they were met

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
                    self.values(_hooks(vars(m), hooks), names)
            if id(kind := type(m)) not in self._seen:
                self._seen.add(id(kind))
                self.values(of_class(kind), names)
            self._marks.append(_END)

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
        for name, child in m._modules.items():
            self._marks.append(intern(str(name)))
            if child is None:
                self._marks.append(None)
            else:
                self._tree(child, f"{prefix}{name}.", modules, named=named)
        self._marks.append(_END)

    def _tensor(self, t: Tensor) -> None:
        """A loose tensor, and for one that has been met before which it is."""
        if (known := self._tensors.get(id(t))) is not None:
            self._marks.append(_one(known))
            return
        self._tensors[id(t)] = len(self._tensors)
        self.found.loose[len(self._marks)] = t
        self._marks.append(Tensor)

    def values(self, items: Iterable[tuple[Any, Any]], names: Names = _no_names) -> None:
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
                self._marks += (kind, _one(value)) if kind is str else (_one(value),)
            elif isinstance(value, Tensor):
                self._tensor(value)
            elif id(value) in self._seen:
                self._marks.append(value)
            elif isinstance(value, nn.Module):
                self.modules(value, named=False)
            elif (numbers := _numbers_in(value)) is not None:
                self._marks.append(_one(numbers))
            elif (inside := _inside(value)) is None:
                self._object(value, names)
            else:
                self._container(value, inside, names)

    def _object(self, value: Any, names: Names) -> None:
        """An object, and those of its attributes that the code names."""
        kind, own = type(value), names(value)
        self._marks += (value, kind)
        self.holders.append(value)
        # other code may read other attributes of it
        if (own or is_users(kind)) and (id(value), own) not in self._seen:
            self._seen.add((id(value), own))
            held, further = _attributes(value, own)
            self.values(held, functools.partial(_either, names, further))
            self._marks.append(_END)

    def _container(self, value: Any, inside: list[tuple[Any, Any]], names: Names) -> None:
        """A container, settings or code, and what is in it."""
        kind = type(value)
        self._seen.add(id(value))
        self.holders.append(value)
        if kind is FunctionType:
            self._marks.append(value.__code__)
            if vars(value):  # attributes of a function
                own = names(value) | names_in_code(value)
                inside = [*inside, *((k, v) for k, v in vars(value).items() if k in own)]
        # what is in it may tell all: another object for the same thing is no change
        told = isinstance(value, (*_CONTAINERS, *_TOLD)) or is_users_alone(kind)
        self._marks.append(kind if told else value)
        if isinstance(value, FunctionType | MethodType):
            names = _looked_up_once(functools.partial(names_in_code, value))
        elif isinstance(value, _CONTAINERS) and is_users(kind):
            held, further = _attributes(value, names(value))
            inside, names = [*inside, *held], functools.partial(_either, names, further)
        self.values(inside, names)
        self._marks.append(_END)


def _hooks(held: dict[str, Any], hooks: str) -> Iterator[tuple[str, Any]]:
    """A module's hooks of one kind, each with how it is called."""
    for key, hook in held[hooks].items():
        yield "", hook
        for how in HOW:
            yield how, key in held.get(f"{hooks}_{how}", ())


def _looked_up_once(names: Callable[[], frozenset[str]]) -> Names:
    """Names that are the same for every object, and not asked for where there is none."""
    known = functools.cache(names)
    return lambda _: known()


def _names_in(modules: list[nn.Module]) -> frozenset[str]:
    """The names in all code of modules: their forwards, functions that they hold, hooks."""
    held = [
        f
        for m in modules
        for of in (vars(m), *(vars(m)[h] for h in HOOKS if vars(m).get(h)))
        for f in of.values()
    ]
    code = [f for f in held if isinstance(f, FunctionType | MethodType)]
    return frozenset[str]().union(*map(names_in_forward, set(map(type, modules))), *map(names_in_code, code))


_ones: dict[Any, Any] = {}


def exact(value: Any) -> Any:
    """A key for a value that cannot change: equal for those that no code tells apart, and for no others."""
    kind = type(value)
    # -0.0 == 0.0, nan != nan, and 1 == 1.0 == True
    return kind, value.hex() if kind is float else repr(value) if kind is complex else value


def _one(value: Any) -> Any:
    """One object for all equal ones: 0.1 that has been computed anew is another object, and no change."""
    if type(value) not in _EQUAL:
        return value
    if len(_ones) > _MOST:  # a coefficient that is another at every step
        _ones.clear()
    try:
        return _ones.setdefault(exact(value), value)
    except TypeError:  # a size that a loss has kept of what is being written down has no hash
        return value


def _outline(t: Tensor) -> Any:
    """What code may ask of a tensor beside its numbers."""
    if t._has_symbolic_sizes_strides:  # a loss has kept it that is being written down
        return type(t)
    strides = t.stride() if t.layout is torch.strided else None
    return type(t), t.shape, t.dtype, t.device, t.layout, strides, t.requires_grad


def _numbers_in(value: Any) -> bytes | None:
    """A digest of an array that is not large, of NumPy's or Python's, which may change in place; None for anything else."""
    if type(value) in _CODE or isinstance(value, _CONTAINERS):
        return None
    try:
        view = memoryview(value)
    except Exception:  # noqa: BLE001 - no array, or one of dates
        return None
    if view.nbytes > _BYTES or "O" in view.format:
        return None
    kind = type(value)
    what = f"{kind.__module__}.{kind.__qualname__} {view.format} {view.shape}".encode()
    return hashlib.blake2b(what + view.tobytes(), digest_size=16).digest()


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """What a container holds, code reads, or an object is made of that is made of settings; None for any other."""
    try:
        found = _look_inside(value)
        return None if found is None else list(found)
    except Exception:  # noqa: BLE001 - a class of the user's may refuse to be gone through; then it is itself alone
        return None


def _attributes(value: Any, names: frozenset[str]) -> tuple[list[tuple[Any, Any]], frozenset[str]]:
    try:
        return of_object(value, names)
    except Exception:  # noqa: BLE001 - as above
        return [], frozenset()


def _either(names: Names, further: frozenset[str], value: Any) -> frozenset[str]:
    return names(value) | further


def _look_inside(value: Any) -> Iterable[tuple[Any, Any]] | None:
    kind = type(value)
    if kind in _CODE:
        return of_function(value) if kind is not type else of_class(value)
    if isinstance(value, type):
        return of_class(value)
    if isinstance(value, functools.partial):
        return [("", value.func), *enumerate(value.args), *value.keywords.items()]
    if kind is ModuleType:
        return None
    if isinstance(value, ContextVar):
        return [("", value.get(None))]
    if isinstance(value, _CONTAINERS) and len(value) > MANY:
        return None
    if isinstance(value, Mapping):
        return [*enumerate(value), *enumerate(value.values())]  # the keys count too
    if isinstance(value, _CONTAINERS):
        return enumerate(value)
    if not _is_settings(value):
        return None
    slots = attribute_names(value) - vars(value).keys()
    return [*vars(value).items(), *((n, getattr(value, n, None)) for n in sorted(slots))]


def _is_settings(value: Any) -> bool:
    """Whether an object is made of plain values, and not of many: a configuration, and not a part of the program."""
    left, looked_at = [(value, 4)], 0
    while left:
        held, depth = left.pop()
        looked_at += 1
        if type(held) in ATOMS or type(held) in _CODE or isinstance(held, type | ModuleType):
            continue
        if not depth or looked_at > MANY or isinstance(held, Tensor | nn.Module):
            return False
        if isinstance(held, Mapping | list | tuple | set | frozenset):
            if len(held) > MANY:
                return False
            parts: Iterable[Any] = held.values() if isinstance(held, Mapping) else held
        elif hasattr(held, "__dict__"):
            parts = vars(held).values()
        else:
            return False
        left += [(part, depth - 1) for part in parts]
    return True
