"""What autograd has recorded of a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def history(t: Tensor, until: Iterable[Any] = ()) -> Iterator[Any]:
    """The autograd nodes that lie behind a value, back to those of `until`."""
    seen: set[Any] = {None, *until}
    left: list[Any] = [t.grad_fn]
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def is_through_custom(t: Tensor, until: Iterable[Any] = ()) -> bool:
    """Whether a custom `autograd.Function`, whose backward may do anything, lies behind a value, back to the nodes of `until`."""
    return any(isinstance(node, BackwardCFunction) for node in history(t, until))


def read_from(t: Tensor, params: dict[str, Tensor], until: Iterable[Any] = ()) -> list[str]:
    """The names of the parameters that a value has been computed from, back to the nodes of `until`."""
    names = {id(p): k for k, p in params.items()}
    found = {id(getattr(node, "variable", None)) for node in history(t, until)}
    return sorted(names[i] for i in found & names.keys())
