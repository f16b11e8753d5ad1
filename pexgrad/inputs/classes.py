"""Classes of the user's own program, and the functions in them: a library's do not change between two calls."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from functools import cached_property
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

from ..base.source import is_installed

Reads = list[tuple[Any, Any]]  # what is read, each behind its name

_own: weakref.WeakKeyDictionary[type, list[type]] = weakref.WeakKeyDictionary()

# special methods that no syntax calls while a model runs
_APART = frozenset({
    "__init__", "__new__", "__del__", "__repr__", "__str__", "__format__", "__hash__", "__init_subclass__", "__class_getitem__",
    "__set_name__", "__subclasshook__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__",
    "__getnewargs_ex__", "__copy__", "__deepcopy__", "__dir__", "__sizeof__",
})  # fmt: skip

# From Python 3.14 on a class has a function that tells its annotations, with all that these name; nothing runs it in a forward.
_OF_ANNOTATIONS = frozenset({"__annotate__", "__annotate_func__"})


def is_users(kind: type) -> bool:
    """Whether a class belongs to the user's own program; one that was defined at a prompt does."""
    module = sys.modules.get(kind.__module__)
    return module is None or not is_module_installed(module)


def is_users_alone(kind: type) -> bool:
    """Whether all code of a class is the user's, bases included, so that its objects hold nothing that cannot be seen."""
    return len(own_bases(kind)) == len(kind.__mro__) - 1


def own_bases(kind: type) -> list[type]:
    """The class and its bases, as far as they are the user's."""
    if kind not in _own:
        _own[kind] = [c for c in kind.__mro__ if is_users(c)]
    return _own[kind]


def own_members(kind: type) -> dict[str, Any]:
    """What a class has by name in it and its bases, as far as they are the user's."""
    return {n: v for c in reversed(own_bases(kind)) for n, v in _in_class(c)}


def _in_class(kind: type) -> Iterator[tuple[str, Any]]:
    return ((n, v) for n, v in vars(kind).items() if n not in _OF_ANNOTATIONS)


def is_module_installed(module: Any) -> bool:
    """Whether a module, or what stands for one in `sys.modules`, is Python's or a library's."""
    name, file = (getattr(module, key, None) or "" for key in ("__name__", "__file__"))
    # what a library has started is the user's: a prompt or a profiler (`python -m cProfile`) leaves `__main__` its own file
    return name != "__main__" and (name in sys.builtin_module_names or is_installed(file))


def of_class(kind: type) -> Reads:
    """The methods and attributes of a class; nothing for a library's."""
    held = [(k, function_under(v)) for c in own_bases(kind) for k, v in _in_class(c)]
    return [
        (k, v)
        for k, v in held
        if isinstance(v, FunctionType) or not (k.startswith("__") or isinstance(v, MemberDescriptorType))
    ]


def functions_of_class(kind: type) -> list[tuple[str, FunctionType]]:
    """The methods of a user's class that find something in their closures or defaults, each by its name."""
    return [(n, f) for n, f in own_members(kind).items() if isinstance(f, FunctionType) and holds_values(f)]


def holds_values(function: FunctionType) -> bool:
    """Whether a function has anything in its closure or in its default arguments."""
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)


def function_under(held: Any) -> Any:
    """The function under a method or a property; anything else as it is."""
    if isinstance(held, property):
        return held.fget
    if isinstance(held, cached_property):
        return held.func
    return held.__func__ if isinstance(held, MethodType | classmethod | staticmethod) else held


def is_unnamed(name: str) -> bool:
    """Whether it is the name of a special method that some syntax calls."""
    return name.startswith("__") and name not in _APART


def unnamed(kind: type) -> list[FunctionType]:
    """The special methods of a user's class, which code calls without a name: `table[i]`, `with scale:`, `op(x)`."""
    return [f for n, f in of_class(kind) if isinstance(f, FunctionType) and is_unnamed(n)]
