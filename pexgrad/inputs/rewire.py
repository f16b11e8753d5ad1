"""Makes the functions that a copied module holds refer to the copy.

`copy.deepcopy` does not copy functions. A hook that keeps an activation in `self.kept`, a forward behind a decorator, or a
function with a list of layers in its closure would go on working with the original module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from .classes import functions_of_class, holds_values
from .contents import plain_attributes
from .hooks import HOOKS
from .reached import parts_of

Memo = dict[int, Any]  # that of `copy.deepcopy`: the identity of what has been copied -> its copy

_CODE = (FunctionType, MethodType, functools.partial)


def rewire(copied: nn.Module, memo: Memo) -> None:
    """Let the functions in a copy find the copies of what they found in their closures and defaults."""
    for module in copied.modules():
        for held in _holders(module):
            for key, f in list(held.items()):
                if isinstance(f, _CODE) and (new := _renewed(f, memo)) is not f:
                    held[key] = new
        for name, f in functions_of_class(type(module)):
            if name not in vars(module) and (new := _renewed(f, memo)) is not f:
                vars(module)[name] = MethodType(new, module)


def _holders(module: nn.Module) -> Iterator[dict[Any, Any]]:
    held = vars(module)
    if any(isinstance(v, _CODE) for v in plain_attributes(module).values()):
        yield held
    yield from (held[hooks] for hooks in HOOKS if held.get(hooks))


def _renewed(value: Any, memo: Memo) -> Any:
    """What stands in a copy for a value; the value itself where that is nothing else."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _rebuilt(value, memo)
    if isinstance(value, MethodType):
        return _put_together(MethodType, (value.__func__, value.__self__), memo) or value
    if isinstance(value, functools.partial):
        make = functools.partial(_partial, len(value.args), tuple(value.keywords))
        return _put_together(make, (value.func, *value.args, *value.keywords.values()), memo) or value
    holds_copied = any(memo.get(id(part), part) is not part for part in parts_of(value))
    return copy.deepcopy(value, memo) if holds_copied else value


def _put_together(make: Any, parts: tuple[Any, ...], memo: Memo) -> Any:
    new = [_renewed(part, memo) for part in parts]
    return make(*new) if any(a is not b for a, b in zip(new, parts, strict=True)) else None


def _partial(n: int, names: tuple[str, ...], func: Any, *values: Any) -> Any:
    return functools.partial(func, *values[:n], **dict(zip(names, values[n:], strict=True)))


def _rebuilt(f: FunctionType, memo: Memo) -> FunctionType:
    if not holds_values(f):
        return f
    closure = tuple(CellType() for _ in f.__closure__ or ())
    new = FunctionType(f.__code__, f.__globals__, f.__name__, None, closure)
    memo[id(f)] = new  # it may find itself there
    if f.__defaults__:
        new.__defaults__ = tuple(_renewed(v, memo) for v in f.__defaults__)
    if f.__kwdefaults__:
        new.__kwdefaults__ = {k: _renewed(v, memo) for k, v in f.__kwdefaults__.items()}
    for cell, own in zip(f.__closure__ or (), closure, strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            own.cell_contents = _renewed(cell.cell_contents, memo)
    # such as what it was made of by `torch.compile`
    vars(new).update({k: _renewed(v, memo) for k, v in vars(f).items()})
    if all(a is b or a is new for a, b in zip(_held(new), _held(f), strict=True)):
        memo[id(f)] = f
    return memo[id(f)]


def _held(f: FunctionType) -> Iterator[Any]:
    yield from f.__defaults__ or ()
    yield from (f.__kwdefaults__ or {}).values()
    for cell in f.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
