"""What autograd has recorded of a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def history(t: Tensor, until: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd that lie behind a value, as far as those of `until`."""
    seen: set[Any] = {None, *until}
    left: list[Any] = [t.grad_fn]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def read_from(t: Tensor, params: dict[str, Tensor], until: Iterable[Any] = ()) -> list[str]:
    """The names of the parameters that a value has been computed from, as far as the nodes of `until`."""
    names = {id(p): k for k, p in params.items()}
    found = {id(getattr(node, "variable", None)) for node in history(t, until)}
    return sorted(names[i] for i in found & names.keys())
