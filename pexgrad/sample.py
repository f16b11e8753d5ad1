"""A few examples and slightly changed parameters, on which a new trace is probed and verified.

The parameters are jittered so that a layer initialised to zero does not hide everything before it. Own
generators are used throughout: the global ones are neither read nor advanced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import trees

# batch sizes to try, in this order: three tell the parts of a fold apart
SIZES = (3, 2, 4, 5, 6, 8, 16, 32, 64)


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch of a few examples."""

    params: dict[str, Tensor]
    x: Any
    y: Any
    batch: int
    scramble: bool = True  # whether values that are not numbers to compute with may be mixed up

    def inputs(self) -> list[Tensor]:
        """The input tensors, in order."""
        return trees.tensors(trees.as_call(self.x))

    def first(self, n: int) -> Sample:
        """The first n examples."""
        return Sample(
            self.params, trees.examples(self.x, 0, n), trees.examples(self.y, 0, n), n, self.scramble
        )

    def at(self, params: dict[str, Tensor]) -> Sample:
        """The same examples at other parameters."""
        return Sample(params, self.x, self.y, self.batch, self.scramble)


def draw(
    serves: Callable[[int], bool], params: dict[str, Tensor], trainable: set[str], x: Any, y: Any, batch: int,
    scramble: bool,
) -> Sample:  # fmt: skip
    """Take the user's first examples, repeated with some noise where there are too few."""
    size = next((n for n in (*SIZES, batch) if serves(n)), batch)
    generator = torch.Generator().manual_seed(0)
    index = [i % batch for i in range(size)]
    x, y = trees.take(x, index), trees.take(y, index)
    if batch < size:
        x = trees.map_tensors(lambda t: changed(t, slice(batch, size), generator, scramble and batch == 1), x)
    jittered = {k: _jitter(p, generator) if k in trainable else p.detach() for k, p in params.items()}
    return Sample(jittered, x, y, size, scramble)


def _jitter(p: Tensor, generator: torch.Generator) -> Tensor:
    fan_in = p[0].numel() if p.dim() > 1 and p.shape[0] else 100
    noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
    p = p.detach()
    return (p + noise * (0.1 * p.abs() + 0.1 / max(1, fan_in) ** 0.5)).requires_grad_()


def changed(t: Tensor, where: int | slice, generator: torch.Generator, scramble: bool) -> Tensor:
    """`t` with other values in some examples: noise for numbers; for the rest, values that the model is sure to take.

    Those are another example's; or, with `scramble`, values from elsewhere in `t`, which may not fit one another (boxes
    whose left edge is right of the right one).
    """
    out, part = t.clone(), t[where]
    if part.numel() == 0 or t.dtype == torch.bool:
        return out
    if t.is_floating_point() or t.is_complex():
        noise = torch.randn(part.shape, generator=generator).to(t.device, t.dtype)
        out[where] += noise * (0.3 * part.abs() + 0.1)
        return out
    if isinstance(where, int):
        out[where] = t[(where + 1) % t.shape[0]]
    if (
        scramble and t.device.type == "cpu" and torch.equal(out, t)
    ):  # an index out of range would end a CUDA process
        pick = torch.randint(t.numel(), part.shape, generator=generator)
        out[where] = t.flatten()[pick]
    return out
