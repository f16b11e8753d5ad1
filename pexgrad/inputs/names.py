"""The names in a function's code: what it may read of globals, attributes and modules. None for a library's."""

from __future__ import annotations

import contextlib
import dis
import weakref
from collections.abc import Iterator
from importlib.util import resolve_name
from types import CodeType, FunctionType
from typing import NamedTuple

from ..base.source import is_installed


class Names(NamedTuple):
    """The names in a function's code, and in that of the functions in it."""

    code: CodeType
    every: frozenset[str]  # of globals and attributes
    of_globals: frozenset[str]  # an attribute may have the name of a global that is something else
    imported: frozenset[str]  # the full names of modules that it imports when it runs


_known: weakref.WeakKeyDictionary[FunctionType, Names] = weakref.WeakKeyDictionary()


def names_of(function: FunctionType) -> Names:
    """The names in a function's code, looked up once for as long as it has that code."""
    code, known = function.__code__, _known.get(function)
    if known is None or known.code is not code:  # a notebook that reloads code gives a function another
        codes = [] if is_installed(code.co_filename) else list(codes_in(code))
        read = [i for c in codes for i in _loads(c)]
        every = frozenset(i.argval for i in read).union(_names_in_text(codes))
        of_globals = frozenset(i.argval for i in read if _is_of_global(i))
        package = function.__globals__.get("__package__")
        imported = frozenset(name for c in codes for name in _imports(c, package))
        known = _known[function] = Names(code, every, of_globals, imported)
    return known


def names_in(function: FunctionType) -> frozenset[str]:
    """The names of globals and attributes in a function's code; none for a library's."""
    return names_of(function).every


def _loads(code: CodeType) -> Iterator[dis.Instruction]:
    """The instructions that load a global, an attribute or a part of a module; what code only stores is not read."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_", "IMPORT_FROM")) and instruction.argval in code.co_names:
            yield instruction


def _is_of_global(load: dis.Instruction) -> bool:
    return "GLOBAL" in load.opname or load.opname == "LOAD_NAME"  # the latter in the body of a class


def _imports(code: CodeType, package: str | None) -> Iterator[str]:
    """The modules that code imports when it runs, and the packages that these are in."""
    instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for level, _, imported in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if imported.opname == "IMPORT_NAME":
            with contextlib.suppress(ImportError):  # beyond the top of a package: the code itself fails
                parts = resolve_name("." * level.argval + imported.argval, package).split(".")
                yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def _names_in_text(codes: list[CodeType]) -> Iterator[str]:
    """The names that code may look up as constants: `getattr(settings, "scale")`, or `name` for each of `("scale", "shift")`.

    Which of a function's codes has the constant and which the call depends on the Python: 3.12 puts comprehensions in line.
    """
    if all(_BY_TEXT.isdisjoint(code.co_names) for code in codes):
        return
    left = [c for code in codes for c in code.co_consts]
    while left:
        constant = left.pop()
        if isinstance(constant, tuple | frozenset):
            left += constant
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


_BY_TEXT = frozenset(
    {"getattr", "hasattr", "vars", "attrgetter", "methodcaller", "__dict__", "get_parameter", "get_buffer"}
)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions, classes and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
