"""What a loss does, step by step, and whether it does the same again in a batch of another size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Step = tuple[Any, ...]  # a function, and what it was called with (see `Steps`)

# what a function is called with, beside tensors and numbers: compared as it is, since another makes it another function
_SETTINGS = (int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.SymInt)
_OPEN = object()  # an integer that is another for another batch


def leaves_of(args: Any, kwargs: Any) -> list[Any]:
    """Arguments in a row; a slice as the three that it is made of."""
    found = []
    for leaf in pytree.tree_leaves((args, kwargs)):
        found += [leaf.start, leaf.stop, leaf.step] if type(leaf) is slice else [leaf]
    return found


class Steps:
    """The functions that a loss calls, each with its settings and with which tensors it is given."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.steps: list[Step] = []  # so far
        # of all tensors, in the order in which they came up; kept alive, so that none takes another's
        self._places: dict[int, tuple[int, Tensor]] = {}
        self.meet(tensors)

    def note(self, func: Any, leaves: Sequence[Any]) -> None:
        """Add a call with these arguments."""
        self.steps.append((func, *(s for leaf in leaves for s in self._settings(leaf))))

    def meet(self, values: Iterable[Any]) -> None:
        """Know the tensors among values from now on."""
        for t in values:
            if isinstance(t, Tensor):
                self._place(t)

    def _place(self, t: Tensor) -> int:
        return self._places.setdefault(id(t), (len(self._places), t))[0]

    def _settings(self, leaf: Any) -> Sequence[Any]:
        """What is compared of an argument: of a tensor which one it is, of a coefficient that it is one."""
        if isinstance(leaf, Tensor):
            # of one that the loss has from elsewhere, and may have another for later, the shape as well
            shape = () if id(leaf) in self._places else leaf.shape
            return [(self._place(leaf),), *shape]
        return [leaf if type(leaf) in _SETTINGS else type(leaf)]


def _are_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b  # 1 is not True


def common(one: list[Step], other: list[Step]) -> list[Step] | None:
    """The steps of a loss for any batch, from those for two sizes of batch; None where it does not do the same for both."""

    def joined(pair: tuple[Any, Any]) -> Any:
        a, b = pair
        if _are_equal(a, b):
            return a
        if type(a) is not int or type(b) is not int:
            raise ValueError
        return _OPEN

    try:
        return [tuple(map(joined, zip(a, b, strict=True))) for a, b in zip(one, other, strict=True)]
    except ValueError:  # another function, or more of them
        return None


def is_one_of(steps: list[Step], known: list[list[Step]]) -> bool:
    """Whether a loss has gone by one of these lists of steps."""

    def same(a: Any, want: Any) -> bool:
        if want is _OPEN:
            return isinstance(a, int | torch.SymInt)
        return _are_equal(a, want)

    def all_same(want: list[Step]) -> bool:
        return len(steps) == len(want) and all(
            len(a) == len(b) and all(map(same, a, b)) for a, b in zip(steps, want, strict=True)
        )

    return any(map(all_same, known))
