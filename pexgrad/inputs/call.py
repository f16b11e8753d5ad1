"""One call of a transform: everything that a model and a loss are evaluated at.

The same is what a trace is probed and verified on (a few examples at changed parameters), and what a flat graph is recorded
from (fake tensors in the place of all).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..base import trees
from ..base.checks import shaped
from ..base.compare import moved
from ..base.fakes import fake
from ..base.modes import recording
from ..errors import InputError
from .snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, checked, and what the module held then."""

    params: dict[str, Tensor]  # all of the model's: the given ones in their order, then its own
    trainable: list[str]  # the entries to differentiate, in the order given
    buffers: Sequence[Tensor]
    x: Any
    y: Any
    batch: int
    module: Snapshot

    # --- as lists of tensors ------------------------------------------------------------------------

    def inputs(self) -> list[Tensor]:
        """The tensors of `x`, (B, ...)."""
        return trees.tensors(trees.as_call(self.x))

    def targets(self) -> list[Tensor]:
        """The tensors of `y`, (B, ...)."""
        return trees.tensors(self.y)

    def values(self) -> list[Tensor]:
        """What a trace's graph takes: parameters, buffers, inputs."""
        return [*self.params.values(), *self.buffers, *self.inputs()]

    def flat(self) -> list[Tensor]:
        """What a flat graph takes: the same, then the targets."""
        return [*self.values(), *self.targets()]

    def around(self, flat: Iterable[Tensor], batch: Any) -> Call:
        """The same around other tensors, in the order of `flat`, with positional and keyword arguments as one tuple for `x`."""
        left = iter(flat)
        params = {k: next(left) for k in self.params}
        buffers = [next(left) for _ in self.buffers]
        x, y = (trees.map_tensors(lambda _: next(left), tree) for tree in (trees.as_call(self.x), self.y))
        return replace(self, params=params, buffers=buffers, x=x, y=y, batch=batch)

    def fakes(self, mode: FakeTensorMode) -> list[Tensor]:
        """Parameters and buffers without their numbers, the first of what a graph is recorded from."""
        params = [fake(mode, p).requires_grad_(k in self.trainable) for k, p in self.params.items()]
        return params + [fake(mode, b) for b in self.buffers]

    # --- elsewhere ----------------------------------------------------------------------------------

    def moved(self, part: float = 0.0) -> Call:
        """The same with each number of the trainable parameters made larger or smaller by this part, two roundings at least."""

        def other(p: Tensor) -> Tensor:
            return moved(p.detach(), max(part, 2 * torch.finfo(p.dtype).eps)).requires_grad_()

        return self.at({k: other(p) if p.requires_grad else p for k, p in self.params.items()})

    def at(self, params: dict[str, Tensor]) -> Call:
        """The same examples at other parameters."""
        return replace(self, params=params)

    def at_leaves(self, attached: bool = False) -> Call:
        """The same with parameters as leaves of its own, or as views of the given ones where these require gradients."""
        own = set(self.trainable)
        return self.at(
            {
                # a view for each name: the rows of one do not count those of another that is the same tensor
                k: p.view_as(p) if attached and p.requires_grad else p.detach().requires_grad_(k in own)
                for k, p in self.params.items()
            }
        )

    def copied(self) -> Call:
        """The same at copies of the parameters, into which a model may write: leaves where these are."""

        def copy(p: Tensor) -> Tensor:
            return p.detach().clone().requires_grad_(p.requires_grad) if p.is_leaf else p.clone()

        return self.at({k: copy(p) for k, p in self.params.items()})

    def with_inputs(self, f: Callable[[Tensor], Tensor]) -> Call:
        """The same with `f` of every tensor of `x`."""
        return replace(self, x=trees.map_tensors(f, self.x))

    def examples(self, start: int, stop: int) -> Call:
        """The same on some of the examples."""
        stop = min(stop, self.batch)
        return self._picked(lambda t: t[start:stop], stop - start)

    def take(self, index: list[int]) -> Call:
        """The same on the examples `index`; repeats are allowed."""
        return self._picked(lambda t: t[torch.tensor(index, device=t.device)], len(index))

    def chosen(self, mask: Tensor) -> Call:
        """The same on the examples that a mask (B,) of booleans counts."""
        self.check_mask(mask)
        return self._picked(lambda t: t[mask], int(mask.sum()))

    def _picked(self, pick: Callable[[Tensor], Tensor], batch: int) -> Call:
        x, y = (trees.map_tensors(pick, tree) for tree in (self.x, self.y))
        return replace(self, x=x, y=y, batch=batch)

    def check_mask(self, mask: Tensor) -> None:
        """Raise where `mask` is not (B,) booleans."""
        shaped(mask, (self.batch,), "mask", "true for the examples that count")
        if mask.dtype != torch.bool:
            raise InputError(
                f"mask ({self.batch},) is in {mask.dtype}; expected torch.bool, true for the examples that count"
            )

    # --- what it results in -------------------------------------------------------------------------

    def bytes_of_rows(self) -> int:
        """What the rows take."""
        return self.batch * sum(
            self.params[k].numel() * self.params[k].element_size() for k in self.trainable
        )

    def room(self) -> dict[str, Tensor]:
        """name -> memory for the rows (B, *shape) of the entries to differentiate, not initialised."""
        with recording(False):
            return {k: self.params[k].new_empty(self.batch, *self.params[k].shape) for k in self.trainable}

    def zeros(self, *leading: int) -> dict[str, Tensor]:
        """name -> zeros (*leading, *shape) for the entries to differentiate."""
        return {
            k: self.params[k].detach().new_zeros((*leading, *self.params[k].shape)) for k in self.trainable
        }

    def no_numbers(self) -> Tensor:
        """(0,): what losses and norms are for no examples."""
        return example_numbers([self.params[k].detach() for k in self.trainable])


def example_numbers(entries: list[Tensor], batch: Any = 0, device: Any = None) -> Tensor:
    """(B,), not initialised, of the dtype of numbers that are computed from these entries: real, and at least float32."""
    dtype = torch.float32
    for p in entries:
        dtype = torch.promote_types(dtype, p.dtype.to_real())
    return torch.empty(batch, dtype=dtype, device=device or (entries[0].device if entries else None))
