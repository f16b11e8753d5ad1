"""Refuses code that looks a module up by its identity, in a table with modules or their `id()` for keys: `SCALES.get(self, 1.0)`.

Every strategy runs copies of the modules around other parameters. A copy is not found in such a table, or is taken for another
module; and the definition runs copies too, so that verification would see the same wrong number on both sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ..errors import TraceError
from .classes import functions_of_class, own_bases
from .contents import ATOMS, attributes_of, plain_attributes
from .hooks import hooks_in
from .reached import MANY, beside, parts_of, read_in_forward
from .rebind import rebind


def refuse_known(model: Any) -> None:
    """Raise where the forward of a copy would look itself up in a table of the modules that it is a copy of."""
    if not isinstance(model, nn.Module):
        return
    own = {id(m): path for path, m in model.named_modules()}
    # nearly always nothing, and then no copy is made: beside what its module holds, one may hold methods of the class
    if not any(True for m in model.modules() for _ in _known(m, own, functions_of_class(type(m)))):
        return
    for copied in rebind(model, {}).modules():
        for name, path in _known(copied, own):
            what = f"the module at '{path}'" if path else "the model"
            raise TraceError(
                f"the forward of {type(copied).__name__} reads '{name}', a table with {what} for a key, or its id(): a pure "
                "function runs copies of modules, which are not found there. Keep what is looked up as an attribute of the "
                "module"
            )


def _known(
    module: nn.Module, own: dict[int, str], methods: Iterable[tuple[str, FunctionType]] = ()
) -> Iterator[tuple[str, str]]:
    """The tables that a module's code reads with one of its own modules for a key: the table's name, the module's path."""
    held = plain_attributes(module)
    code = [*held.values(), *hooks_in(module), *(f for _, f in methods)]
    names, read = read_in_forward(type(module), code)
    left, seen = [*held.items(), *read], set[int]()
    while left:
        name, value = left.pop()
        for part in () if type(value) in ATOMS else parts_of(value):
            if type(part) in ATOMS or id(part) in seen:
                continue
            seen.add(id(part))
            for key in _keys(part):
                known = key if type(key) is int else id(key)
                if known in own:
                    yield name, own[known]
            if isinstance(part, FunctionType):  # a method of an object
                left += beside(part)
            elif isinstance(part, ModuleType) or own_bases(type(part)):
                left += [(f"{name}{n}", v) for n, v in attributes_of(part, names)[0]]


def _keys(table: Any) -> list[Any]:
    with contextlib.suppress(Exception):  # a class of the user's may refuse to be gone through
        if isinstance(table, Mapping | set | frozenset) and len(table) <= MANY:
            return [*table]
    return []
