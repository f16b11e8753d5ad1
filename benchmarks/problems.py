"""A problem is one case at one batch size on one device: what every contender is handed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from benchmarks.models import Case
from benchmarks.reference import Loop

WORK = {
    "rows": "the gradient of every example, (B, *shape) a parameter",
    "norms": "the norm of every example's gradient, (B,)",
    "clipped": "the sum of the examples' gradients, each clipped to the median norm",
}


@dataclass
class Problem:
    """`losses(model(x), y)` is (b,), one loss an example; its rows are what is asked for.

    Contenders read `x` and `y` at each call: the batch of a problem may be exchanged for another.
    """

    case: Case
    model: nn.Module
    x: Tensor
    y: Tensor

    @property
    def losses(self) -> Callable[[Tensor, Tensor], Tensor]:
        return self.case.losses

    @cached_property
    def params(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @cached_property
    def max_norm(self) -> float:
        """The median norm: about half of the examples are clipped."""
        return self.reference.norms.median().item()

    @cached_property
    def reference(self) -> Loop:
        return Loop(self)

    def copy(self) -> Problem:
        """The same problem, whose batch can be exchanged."""
        return Problem(self.case, self.model, self.x, self.y)

    def private_copy(self) -> nn.Module:
        """The same model as other modules over the same memory, for contenders that put hooks or attributes on it."""
        shared = {id(p): nn.Parameter(p.detach()) for p in self.model.parameters()}
        return copy.deepcopy(self.model, shared)


@lru_cache(maxsize=1)  # the kinds of work at one point share the problem, and what the loop says about it
def pose(case: Case, batch: int, device: torch.device, seed: int = 0) -> Problem:
    """The problem with its model and batch drawn from `seed`, the same numbers on every device."""
    torch.manual_seed(seed)
    model = case.build().train()
    fill_zero_weights(model)
    x, y = case.draw(batch)
    return Problem(case, model.to(device), x.to(device), y.to(device))


def fill_zero_weights(model: nn.Module) -> None:
    """A head that starts at zero, as a ViT's does, would leave everything behind it without a gradient to check."""
    for p in model.parameters():
        if p.dim() > 1 and not p.any():
            nn.init.normal_(p, std=0.02)
