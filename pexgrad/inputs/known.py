"""Code that knows a module by who it is: a table outside of the model, with its modules or the `id` of these for keys.

Every strategy runs copies of the modules around other parameters. A copy is not found in `SCALES.get(self, 1.0)`, or is taken for
another one, and then the definition, which runs copies too, has the same wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import TraceError
from .contents import HOOKS, plain_attributes
from .reached import MANY, read_in_forward
from .rebind import rebind


def refuse_known(model: Any) -> None:
    """Raise where the forward of a copy would look itself up in a table of the modules that it is a copy of."""
    if not isinstance(model, nn.Module):
        return
    own = {id(m): path for path, m in model.named_modules()}
    for copied in rebind(model, {}).modules():
        for name, table in _read(copied):
            for key in _keys(table):
                known = key if type(key) is int else id(key)
                if known in own:
                    what = f"the module at '{own[known]}'" if own[known] else "the model"
                    raise TraceError(
                        f"the forward of {type(copied).__name__} reads '{name}', a table with {what} for a key, or its id(): a "
                        "pure function runs copies of modules, which are not found there. Keep what is looked up as an "
                        "attribute of the module"
                    )


def _read(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = plain_attributes(module)
    hooks = [hook for kind in HOOKS for hook in vars(module).get(kind, {}).values()]
    yield from own.items()
    yield from read_in_forward(type(module), [*own.values(), *hooks])


def _keys(table: Any) -> list[Any]:
    with contextlib.suppress(Exception):  # a class of the user's may refuse to be gone through
        if isinstance(table, Mapping | set | frozenset) and len(table) <= MANY:
            return [*table]
    return []
