"""Which way to the norms of a sum of outer products is cheapest, and whether its rows are better kept.

For rows G = sum_t g[t] (x) x[t] there are three ways (multiplications an example):

    product of norms    |g|^2 |x|^2                                   o + i, for one position
    gram                sum over t, t' of <g[t], g[t']> <x[t], x[t']>     t^2 (o + i)
    rows in pieces      the rows themselves, a few examples at a time     t o i

Small rows are quickest to build, whatever is multiplied: inner products take some twenty operations more.

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
# numbers in all rows together, up to which inner products are slower than building these (CPU, one thread, measured on linear
# layers and convolutions for 4 to 64 examples: 70 against 250 us, 220 against 590; about the same time at this size)
SMALL = 1 << 18

# the ways, as `explain` names them
PRODUCT, GRAM, ROWS = "product of norms", "gram", "rows in pieces"


class NormCost(NamedTuple):
    """Multiplications for each example and group."""

    gram: int
    rows: int
    is_product: bool = False  # of one position, whose norm is a product
    is_small: bool = False  # rows together are

    @property
    def way(self) -> str:
        """The cheapest way to the norms."""
        if self.is_product:
            return PRODUCT
        return GRAM if self.gram < self.rows and not self.is_small else ROWS

    @property
    def keeps_rows(self) -> bool:
        """Whether norms and then a weighted sum are cheapest through rows that are kept in between."""
        return not self.is_product and (self.is_small or self.gram > KEEP * self.rows)


def of_outer(positions: int, outputs: int, inputs: int, numbers: int) -> NormCost:
    """For products of o outputs and i inputs at t positions; all rows together have so many numbers."""
    gram = positions**2 * (outputs + inputs)
    return NormCost(gram, positions * outputs * inputs, positions == 1, _is_small(numbers))


def of_convolution(
    positions: int, pixels: int, outputs: int, inputs: int, kernel: tuple[int, ...], numbers: int
) -> NormCost:
    """For channels of one group; all rows together have so many numbers."""
    gram = positions**2 * (outputs + ADDITION * sum(kernel)) + pixels**2 * inputs
    rows = positions * outputs * inputs * prod(kernel)
    return NormCost(gram, rows, is_small=_is_small(numbers))


def _is_small(numbers: int) -> bool:
    return isinstance(numbers, int) and numbers <= SMALL  # a graph for every batch size cannot tell
