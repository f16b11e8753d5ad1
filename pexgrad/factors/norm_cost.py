"""Which way to the norms of a sum of outer products is cheapest, and whether its rows are better kept.

For rows G = sum_t g[t] (x) x[t] there are three ways (multiplications an example):

    product of norms    |g|^2 |x|^2                                   o + i, for one position
    gram                sum over t, t' of <g[t], g[t']> <x[t], x[t']>     t^2 (o + i)
    rows in pieces      the rows themselves, a few examples at a time     t o i

The inner products of a convolution's windows are sums of those of its pixels (`convolving.window_gram`), which takes
p^2 multiplications of channels for p pixels, and additions for each pair of positions: as many as the kernel's sizes
have together.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

# what an addition costs that reads and writes memory, in multiplications of a matrix product (CPU, measured)
ADDITION = 12
# a weighted sum takes about as long as the rows; from rows that were kept it is next to nothing, but they have to be
# written. Measured on 27 layers (CPU): keeping is the faster way from 0.4 to 0.5 of the rows' multiplications on
KEEP = 0.45


class NormCost(NamedTuple):
    """Multiplications for each example and group."""

    positions: int
    gram: int
    rows: int

    @property
    def way(self) -> str:
        """The cheapest way to the norms."""
        if self.positions == 1:
            return "product of norms"
        return "gram" if self.gram < self.rows else "rows in pieces"

    @property
    def keeps_rows(self) -> bool:
        """Whether norms and then a weighted sum are cheapest through rows that are kept in between."""
        return self.positions > 1 and self.gram > KEEP * self.rows


def of_outer(positions: int, outputs: int, inputs: int) -> NormCost:
    """For products of o outputs and i inputs at t positions."""
    return NormCost(positions, positions**2 * (outputs + inputs), positions * outputs * inputs)


def of_convolution(
    positions: int, pixels: int, outputs: int, inputs: int, kernel: tuple[int, ...]
) -> NormCost:
    """For channels of one group."""
    gram = positions**2 * (outputs + ADDITION * sum(kernel)) + pixels**2 * inputs
    return NormCost(max(2, positions), gram, positions * outputs * inputs * prod(kernel))
