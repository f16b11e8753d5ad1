"""What a model holds and its code reads, looked at anew at every call: a trace is right as long as none of it changes.

A module holds parameters and buffers, by name, and everything else that a trace depends on: submodules, flags, settings and
hooks, at any depth of containers and settings objects. What code reads beside its arguments is in `reads.py`.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .reads import (
    MANY,
    attribute_names,
    is_users,
    names_in_code,
    names_in_forward,
    of_class,
    of_function,
    of_object,
)

# how many references were found before a tensor's holder; the attribute, key or index in it
Place = tuple[int, Any]
Names = Callable[[Any], frozenset[str]]  # in the code that may read an object


class Snapshot(NamedTuple):
    """What a model holds at one moment, from one walk through it."""

    parameters: dict[str, Tensor]  # by the names of named_parameters(); a tied one once
    buffers: dict[str, Tensor]
    # everything else that a trace depends on. References are compared by identity, so whoever keeps a fingerprint keeps
    # these too: an object that is alive shares its identity with no other.
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
            a is b or (type(a) is type(b) and type(a) in _ATOMS and a == b)
            for a, b in zip(mine, theirs, strict=True)
        )

    def is_code(self) -> bool:
        """Whether nothing but functions was found: no number, container or object that may be another later."""
        held = self.parameters or self.buffers or self.loose
        return not held and all(r is _END or type(r) in (FunctionType, CodeType) for r in self.references)

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
        return {place: Held(t, None) for place, t in self.loose.items() if id(t) in wanted}

    def contents(self) -> dict[Place, Held]:
        """All loose tensors, as they are now."""
        return {place: Held(t, _version(t), _numbers(t)) for place, t in self.loose.items()}

    def holds(self, places: Mapping[Place, Held]) -> bool:
        """Whether each of the tensors is still in its place, and as it was."""
        return all(self.loose.get(place) is held.tensor and held.is_same() for place, held in places.items())


class Held(NamedTuple):
    """A tensor, and where that matters how often it had been changed in place, and what was in it.

    The latter for a few numbers: what is written by way of `.data`, or into an array of NumPy's in the same memory, counts as no
    change.
    """

    tensor: Tensor
    version: int | None
    numbers: bytes | None = None

    def is_same(self) -> bool:
        """Whether it has not been changed since."""
        same = self.version in (None, _version(self.tensor))
        return same and self.numbers in (None, _numbers(self.tensor))


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
# what nothing can be changed inside of, or nothing that is looked for
_ATOMS = frozenset({
    int, float, complex, bool, str, bytes, type(None), BuiltinFunctionType,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
})  # fmt: skip
_CODE = frozenset({FunctionType, MethodType, type})
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_END = object()
_FEW = 64  # numbers that are looked at
_MOST = 1 << 16  # values that are remembered


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside what every module has."""
    return {k: v for k, v in vars(module).items() if k not in MACHINERY}


def snapshot(model: Callable[..., Any]) -> Snapshot:
    """What a module, a function or any other callable holds and reads."""
    found, seen = Snapshot({}, {}, [], {}), set[Any]()
    if isinstance(model, nn.Module):
        _note_modules(model, found, seen, named=True)
    else:
        of_object = isinstance(getattr(model, "__call__", None), MethodType)  # noqa: B004 - its code is what is read
        _note([("", model.__call__ if of_object else model)], found, seen)
    return found


def held_by(value: Any) -> list[Any]:
    """An object that a call is given beside tensors, and what is in it, at any depth of objects of the user's classes."""
    found = Snapshot({}, {}, [], {})

    def names(held: Any) -> frozenset[str]:
        return attribute_names(held) if held is value or is_users(type(held)) else frozenset()

    _note([("", value)], found, set(), names)
    return [*found.references, *found.loose.values()]


def _note_modules(root: nn.Module, found: Snapshot, seen: set[Any], *, named: bool) -> None:
    """Note a module and those in it; parameters and buffers by name, or as loose tensors."""
    modules: list[nn.Module] = []
    _collect(root, "", modules, found, seen, named=named)
    names = _looked_up_once(lambda: _names_in(modules))  # one module may hold what another is given
    for m in modules:
        held = vars(m)
        found.references.extend((m, type(m)))
        _note(plain_attributes(m).items(), found, seen, names)
        for hooks in HOOKS:
            if held.get(hooks):
                _note(enumerate(held[hooks].values()), found, seen, names)
        if id(kind := type(m)) not in seen:
            seen.add(id(kind))
            _note(of_class(kind), found, seen, names)


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


def _collect(
    m: nn.Module, prefix: str, modules: list[nn.Module], found: Snapshot, seen: set[Any], *, named: bool
) -> None:
    if id(m) in seen:
        return
    seen.add(id(m))
    modules.append(m)
    for own, into in ((m._parameters, found.parameters), (m._buffers, found.buffers)):
        for name, t in own.items():
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                if named:
                    into[prefix + name] = t
                else:
                    found.loose[len(found.references), prefix + name] = t
    for name, child in m._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", modules, found, seen, named=named)


_ones: dict[Any, Any] = {}


def _one(value: Any) -> Any:
    """One object for all equal numbers and strings: 0.1 that has been computed anew is another object, and no change."""
    kind = type(value)
    if kind not in (float, int, str, bytes, complex):
        return value
    if len(_ones) > _MOST:  # a coefficient that is another at every step
        _ones.clear()
    # -0.0 == 0.0, and nan != nan
    exact = value.hex() if kind is float else repr(value) if kind is complex else value
    return _ones.setdefault((kind, exact), value)


def _no_names(_: Any) -> frozenset[str]:
    return frozenset()


def _note(
    items: Iterable[tuple[Any, Any]], found: Snapshot, seen: set[Any], names: Names = _no_names
) -> None:
    """Note what is held or read, and what containers, settings, modules and code among it hold and read in turn.

    Of any other object, the attributes that the code names. A container is what is in it: `torch.func.functional_call` gives a
    recurrent layer new lists of the same weights.
    """
    here = len(found.references)
    for key, value in items:
        kind = type(value)
        if kind is weakref.ReferenceType:
            value = value()
            kind = type(value)
        if kind in _ATOMS:
            found.references.append(_one(value))
        elif isinstance(value, Tensor):
            found.loose[here, key] = value
        elif id(value) in seen:
            found.references.append(value)
        elif isinstance(value, nn.Module):
            _note_modules(value, found, seen, named=False)
        elif (inside := _inside(value)) is None:
            _note_object(value, found, seen, names)
        else:
            _note_inside(value, inside, found, seen, names)


def _note_object(value: Any, found: Snapshot, seen: set[Any], names: Names) -> None:
    """Note an object, and those of its attributes that the code names."""
    kind, own = type(value), names(value)
    found.references.extend((value, kind))
    # other code may read other attributes of it
    if (own or is_users(kind)) and (id(value), own) not in seen:
        seen.add((id(value), own))
        held, further = _attributes(value, own)
        _note(held, found, seen, functools.partial(_either, names, further))


def _note_inside(
    value: Any, inside: list[tuple[Any, Any]], found: Snapshot, seen: set[Any], names: Names
) -> None:
    """Note a container, settings or code, and what is in it."""
    kind = type(value)
    seen.add(id(value))
    if kind is FunctionType:
        found.references.append(value.__code__)
        if vars(value):  # attributes of a function
            own = names(value) | names_in_code(value)
            inside = [*inside, *((k, v) for k, v in vars(value).items() if k in own)]
    anew = isinstance(value, (*_CONTAINERS, MethodType))  # may be another object for the same thing
    found.references.append(kind if anew else value)
    if kind in (FunctionType, MethodType):
        names = _looked_up_once(functools.partial(names_in_code, value))
    _note(inside, found, seen, names)
    found.references.append(_END)


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
    if isinstance(value, (Mapping, *_CONTAINERS)) and len(value) > MANY:
        return None
    if isinstance(value, Mapping):
        return [*enumerate(value), *value.items()]  # the keys count too
    if isinstance(value, _CONTAINERS):
        return enumerate(value)
    return vars(value).items() if _is_settings(value) else None


def _is_settings(value: Any) -> bool:
    """Whether an object is made of plain values, and not of many: a configuration, and not a part of the program."""
    left, looked_at = [(value, 4)], 0
    while left:
        held, depth = left.pop()
        looked_at += 1
        if type(held) in _ATOMS or type(held) in _CODE or isinstance(held, type | ModuleType):
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
