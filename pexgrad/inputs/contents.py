"""What is inside an object that code holds (a module, a container, settings, an array), and which values cannot change.

What code itself reads is in `reads.py`.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, WindowsPath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .classes import of_class
from .reached import MANY
from .reads import attribute_names, of_function, of_object

# attributes that every module has: what is in them is walked through by itself
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_CODE = frozenset({FunctionType, MethodType, type})
CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
# compared by what is in them, whichever object it is
BY_CONTENT = (*CONTAINERS, FunctionType, MethodType, functools.partial, SimpleNamespace)
_BYTES = 1 << 16  # of an array that is looked at


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside what every module has."""
    return {k: v for k, v in vars(module).items() if k not in _MACHINERY}


def numbers_in(value: Any) -> bytes | None:
    """A digest of an array that is not large, of NumPy's or Python's, which may change in place; None for anything else."""
    if type(value) in _CODE or isinstance(value, CONTAINERS):
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


def inside_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a container, what code reads, the attributes of a settings object; None where the object itself counts."""
    try:
        return _look_inside(value)
    except Exception:  # noqa: BLE001 - a class of the user's may refuse to be gone through; then it is itself alone
        return None


def attributes_of(value: Any, names: frozenset[str]) -> tuple[list[tuple[Any, Any]], frozenset[str]]:
    """The attributes of an object that are named, and the names that are reached through it."""
    try:
        return of_object(value, names)
    except Exception:  # noqa: BLE001 - as above
        return [], frozenset()


def _look_inside(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, FunctionType | MethodType):
        return of_function(value)
    if isinstance(value, type):
        return [*of_class(value), *of_class(type(value))]  # a property of its metaclass is read through it
    if isinstance(value, functools.partial):
        return [("", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, ContextVar):
        return [("", value.get(None))]
    if type(value) is ModuleType or (isinstance(value, CONTAINERS) and len(value) > MANY):
        return None
    if isinstance(value, Mapping):
        return [*enumerate(value), *enumerate(value.values())]  # the keys count too
    if isinstance(value, CONTAINERS):
        return [*enumerate(value)]
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


# --- what cannot change -----------------------------------------------------------------------------

# what nothing can be changed inside of, or nothing that is looked for
ATOMS = frozenset({
    int, float, complex, bool, str, bytes, type(None), BuiltinFunctionType, range, Fraction, Decimal, PosixPath, WindowsPath,
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
})  # fmt: skip
# those of which equal ones may be several objects
_EQUAL = ATOMS - {bool, type(None), BuiltinFunctionType, torch.dtype, torch.memory_format, torch.layout}
_MOST = 1 << 16  # values that are remembered
_ones: dict[Any, Any] = {}


def exact(value: Any) -> Any:
    """A key for a value that cannot change: equal for those that no code tells apart, and for no others."""
    kind = type(value)
    # -0.0 == 0.0, nan != nan, and 1 == 1.0 == True
    return kind, value.hex() if kind is float else repr(value) if kind is complex else value


def interned(value: Any) -> Any:
    """One object for all equal ones, so that identity can be compared: 0.1 that has been computed anew is no change."""
    if type(value) not in _EQUAL:
        return value
    if len(_ones) > _MOST:  # a coefficient that is another at every step
        _ones.clear()
    try:
        return _ones.setdefault(exact(value), value)
    except TypeError:  # a size that a loss has kept of what is being written down has no hash
        return value
