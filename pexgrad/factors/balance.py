"""Both sides of a product brought to like size, so that their squares stay in range wherever those of the product do.

The norm of g (x) x is |g| |x|, and inner products of sums of such products are sums of <g, g'> <x, x'>. With x near 1e10 and
g near 1e-25, |g|^2 is 0 in float32 and the norm with it, though it is 1e-15; with x near 1e20 and g = 0 it is 0 inf. For any
m, (m g) (x) (x / m) is the same product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.doubts import answers, may_ask
from ..base.fakes import is_recorded
from ..base.numerics import accumulable, square

# rows whose squared norm is less than this part of their summands' squared norms are built to take it: the inner products of the
# summands cancel there, and what is left of their sum is rounding
CANCELLED = 1e-2


def balance(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """g (b, t, h, ...) and x (b, t, h, ...), scaled where they are out of range, with the same product for each b, t and h."""
    # squares of half precision are in range in float32
    if g.dtype == torch.float16 or 0 in (*g.shape[3:], *x.shape[3:]):
        return g, x
    if is_recorded(g):
        if may_ask(g):
            answers([_out_of_range(g, x)])
            return g, x
    # looking takes no synchronisation on a CPU
    elif g.device.type == "cpu" and _in_range(g) and _in_range(x):
        return g, x
    g, x = accumulable(g), accumulable(x)
    limits = torch.finfo(g.dtype)
    # a power of two, by which nothing is rounded; a constant to autograd, as the products do not depend on it
    exponents = torch.stack([_largest(x), _largest(g)]).clamp(8 * limits.tiny, limits.max).detach().log2()
    m = ((exponents[0] - exponents[1]) / 2).floor().exp2()
    return g * _fit(m, g), x / _fit(m, x)


def cancels(sq: Tensor, squares: Tensor) -> Tensor:
    """(): whether any squared norm (b,) is so far below that of its parts that the sum of their inner products is rounding."""
    return (sq < CANCELLED * squares).any()


def sizes(v: Tensor) -> Tensor:
    """(b, t, h): the norms of v (b, t, h, ...)."""
    dims = tuple(range(3, v.dim()))
    if all(v.stride(i) != 1 for i in dims):  # the norm of what lies apart in memory takes five times as long
        return square(accumulable(v)).sum(dims).sqrt()
    return torch.linalg.vector_norm(v, dim=dims, dtype=accumulable(v[:0]).dtype)


def _in_range(v: Tensor) -> bool:
    """Whether the squares of v (b, t, h, ...) and their sums lose nothing; exact zeros have nothing to lose."""
    lengths = sizes(v.detach())
    if not lengths.numel():
        return True
    limit = _limit(lengths.dtype)
    least, most = (n.item() for n in lengths.aminmax())
    return most < limit and (least > 1 / limit or not v[lengths <= 1 / limit].any())


def _out_of_range(g: Tensor, x: Tensor) -> Tensor:
    """(): the opposite, for both, where no number is there to look at."""
    largest = torch.stack([_largest(g), _largest(x)])
    limit = _limit(largest.dtype) ** 0.9  # lengths are up to thousands of times the largest number
    return ((largest > limit) | ((largest < 1 / limit) & (largest > 0))).any()


def _limit(dtype: torch.dtype) -> float:
    """2^55 in float32, of 2^128: squares of this and of a hundredth of its inverse are normal numbers."""
    return torch.finfo(dtype).max ** 0.43


def _largest(v: Tensor) -> Tensor:
    """(b, t, h): the modulus of the largest number of v (b, t, h, ...)."""
    return v.abs().amax(tuple(range(3, v.dim())))


def _fit(m: Tensor, v: Tensor) -> Tensor:
    """m (b, t, h) with as many dimensions as v."""
    return m.reshape(*m.shape, *[1] * (v.dim() - 3))
