"""Where the examples are in a tensor: which dimension, and which part of a fold.

A batch dimension of size `lead * B * trail` holds example b at the positions (i, b, j): a plain batch has
lead = trail = 1, `(B*T, ...)` has trail = T, `(T*B, ...)` has lead = T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.fakes import is_recorded
from ..base.nodes import batch_dims, fold_factor_of
from ..base.numerics import accumulable, product
from ..errors import TraceError


@dataclass(frozen=True)
class Layout:
    """The place of the batch in a tensor."""

    dim: int = 0
    lead: int = 1
    trail: int = 1

    @property
    def fold(self) -> int:
        """How many positions of the batch dimension belong to one example."""
        return self.lead * self.trail

    def view(self, x: Tensor, batch: int) -> Tensor:
        """(b, lead, trail, *rest): a view with the batch first."""
        parts = x.unflatten(self.dim, (self.lead, batch, self.trail))
        return parts.movedim((self.dim + 1, self.dim, self.dim + 2), (0, 1, 2))

    def split(self, x: Tensor, batch: int) -> Tensor:
        """(b, t, *rest): the batch first, then the t = lead * trail positions of the fold."""
        if self.fold == 1:
            return x.movedim(self.dim, 0).unsqueeze(1) if self.dim else x.unsqueeze(1)
        return self.view(x, batch).flatten(1, 2)

    def example(self, x: Tensor, batch: int, b: int) -> Tensor:
        """Example b as a batch of one, in the place where the batch was."""
        parts = x.unflatten(self.dim, (self.lead, batch, self.trail))
        return parts.narrow(self.dim + 1, b, 1).flatten(self.dim, self.dim + 2)

    def only(self, x: Tensor, batch: int, b: int) -> Tensor:
        """`x` with every example but b replaced by zeros."""
        out = torch.zeros_like(x)
        self.view(out, batch)[b] = self.view(x, batch)[b]
        return out

    def scale(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x` with example b multiplied by `weights[b]`."""
        shape = [1] * x.dim()
        shape[self.dim] = -1
        each = weights[None, :, None].expand(self.lead, -1, self.trail).reshape(shape)
        return product(x, each)


@dataclass(frozen=True)
class Anywhere(Layout):
    """Copies of parameters that every example may use anywhere: which it does use, only its own cotangent tells.

    The cotangents of the examples are then kept apart from the start, (b, *shape), and all positions along `dim` are
    each example's.
    """

    def split(self, x: Tensor, batch: int) -> Tensor:
        """(b, t, *rest) from cotangents (b, *shape)."""
        return x.movedim(self.dim + 1, 1)

    def only(self, x: Tensor, batch: int, b: int) -> Tensor:
        """The cotangent of example b."""
        return x[b]

    def scale(self, x: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the cotangents."""
        wide = accumulable(x)
        return torch.tensordot(weights.to(wide.dtype), wide, 1).to(x.dtype)


class UntoldError(TraceError):
    """A call needs what its trace could not tell, or contradicts it: where a value's examples are, what a loss returns."""


@dataclass(frozen=True)
class Untold(Layout):
    """One of several layouts: no number, and no gradient, has told yet which; an error as soon as it matters."""

    def split(self, x: Tensor, batch: int) -> Tensor:
        """(b, t, *rest) of zeros."""
        return super().split(self._zeros(x), batch)

    def only(self, x: Tensor, batch: int, b: int) -> Tensor:
        """Zeros."""
        return self._zeros(x)

    def scale(self, x: Tensor, weights: Tensor) -> Tensor:
        """Zeros."""
        return self._zeros(x)

    def _zeros(self, x: Tensor) -> Tensor:
        if is_recorded(x) or bool(x.any()):
            raise UntoldError(
                "the examples lie in a fold with other positions, and which position is whose could not be told, since no number "
                "and no gradient differed there when the model was traced; call with other examples or parameters first"
            )
        return x


def candidates(fake: Any, symbol: Any) -> Iterator[Layout]:
    """Every layout that a tensor's symbolic shape allows, the likeliest first."""
    dims = batch_dims(fake, symbol)
    if len(dims) != 1:
        return
    k = fold_factor_of(fake, symbol)
    if k is None:
        return
    # lead = 1, the outer fold, is the common one
    for lead in (d for d in range(1, k + 1) if k % d == 0):
        yield Layout(dims[0], lead, k // lead)
