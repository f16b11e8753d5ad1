"""The branches that the code of a loss (B, ...) has taken, and for which batches it is known that examples stay apart on each.

A number, a flag or the batch size may lead the loss to another branch at a later call (`if step > 1000`). The `form` of a call,
the operations that autograd has recorded in it, tells its branch without a further call of the loss. Autograd does not record
everything (not a weight that is counted in the batch, say), so where the loss reads anything that may change, the functions
of torch that it calls count too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..inputs.held import Held
from .graph import LossGraph

Form = tuple[Any, ...]


# what takes numbers out of a tensor
_READS = frozenset({
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, Tensor.__contains__, Tensor.is_nonzero, Tensor.equal, Tensor.allclose,
    torch.is_nonzero, torch.equal, torch.allclose,
})  # fmt: skip


class Calls(TorchFunctionMode):
    """The functions of torch that are called, in turn."""

    def __init__(self):
        super().__init__()
        self.functions: list[Any] = []

    @property
    def read_numbers(self) -> bool:
        """Whether Python has been given numbers, on which the loss of each example of a batch may depend."""
        return not _READS.isdisjoint(self.functions)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def form(losses: Tensor, given: Iterable[Any]) -> Form:
    """What autograd has recorded from the nodes `given`, of a loss's inputs, to the losses: operations, dimensions, uses."""
    places: dict[Any, int] = {fn: -1 - i for i, fn in enumerate(given) if fn is not None}
    found: list[Any] = []
    left = [losses.grad_fn]
    while left:
        fn = left.pop()
        if fn is None:
            found.append(None)
        elif fn in places:
            found.append(places[fn])
        else:
            places[fn] = len(found)
            found.append((fn.name(), getattr(fn, "_saved_dim", None)))
            left += [of for of, _ in fn.next_functions]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Branch:
    """One that the code has taken."""

    graph: LossGraph | None  # None where it has none
    together: bool = True  # whether the loss may be called for all examples at once
    compared: set[int] = field(default_factory=set)  # with the definition: sizes of batches

    def covers(self, batch: int) -> bool:
        """Whether it is known that each example of a batch of that size has its own number, or is taken by itself."""
        by_graph = self.graph is not None and self.graph.serves(batch)
        return by_graph or not self.together or batch in self.compared


# of a loss whose operations depend on its data, a loop over the classes that are there, no two batches may take the same
_MOST = 256


class Branches:
    """Those that a loss is known to take, by their form; where there are too many, the latest."""

    def __init__(self, graph: LossGraph | None, *, noting: bool):
        self.graph = graph  # of the first: where it has none, no other is recorded
        self.noting = noting  # whether the functions that the loss calls belong to the form of a branch
        self.largest = 0  # batch that examples have been compared in
        self._known: dict[Form, Branch] = {}
        self._read: list[Held] = []  # by a loss without a graph, when its examples were compared

    def notice(self, read: list[Held]) -> None:
        """Forget what is known of a loss without a graph once tensors that it reads have changed, such as weights by place."""
        same = len(read) == len(self._read) and all(
            now.tensor is held.tensor and held.is_same(numbers=True)
            for now, held in zip(read, self._read, strict=True)
        )
        if not same:
            self._known.clear()
            self._read = read

    def get(self, form: Form) -> Branch | None:
        """The branch of this form."""
        return self._known.get(form)

    def keep(self, form: Form, branch: Branch, batch: int) -> None:
        """Remember a branch whose examples have been compared in a batch of that size."""
        branch.compared.add(batch)
        self.largest = max(self.largest, batch)
        if len(self._known) >= _MOST and form not in self._known:
            self._known = dict([*self._known.items()][_MOST // 2 :])
        self._known[form] = branch
