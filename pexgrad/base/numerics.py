"""Arithmetic on tensors whose dimension 0 is the batch, with the precision that sums of products need.

Half precision is accumulated in float32; the inner product of complex gradients is that of real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .fakes import is_recorded
from .trees import runs


def may_write(*made_of: Tensor) -> bool:
    """Whether what is made of these may be made in place: neither written down as a graph nor differentiated again."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in made_of)
    return not differentiable and not any(map(is_recorded, made_of))


def flat(g: Tensor) -> Tensor:
    """(b, p): rows with what is not the batch in one dimension, also where there is nothing else."""
    return g.unsqueeze(-1).flatten(1)


# elements that are looked at one after the other: a copy of a large model's rows as a whole would take their memory once more
_PIECE = 1 << 20


def in_pieces(x: Tensor) -> Iterator[Tensor]:
    """Vectors of the numbers of `x`, so many at a time; views where its memory allows."""
    return (p for p in x.reshape(-1).split(_PIECE) if p.numel())


def channels_last(x: Tensor) -> Tensor:
    """(b, (t s), c) from (b, t, c, *s)."""
    return x.unsqueeze(-1).flatten(3).movedim(2, 3).flatten(1, 2)


def is_half(dtype: torch.dtype) -> bool:
    """Whether its numbers have 16 bits or fewer."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_inexact(x: Tensor) -> bool:
    """Whether its numbers are real or complex ones, and no integers or booleans."""
    return x.is_floating_point() or x.is_complex()


def accumulable(x: Tensor) -> Tensor:
    """`x` in a dtype that sums of products may be accumulated in: half precision in float32."""
    return x.float() if is_half(x.dtype) else x


def weighted(x: Tensor, weights: Tensor) -> Tensor:
    """`x` (b, ...) with example b multiplied by weights[b], rounded once: a clipping weight may vanish in float16."""
    return product(x, weights.reshape(-1, *[1] * (x.dim() - 1)))


def product(x: Tensor, weights: Tensor) -> Tensor:
    """`x` times weights that broadcast against it, rounded once to the dtype of `x`."""
    wide = accumulable(x) if x.dtype != weights.dtype else x
    return (wide * weights.to(wide.dtype)).to(x.dtype)


def in_range(x: Tensor) -> Tensor:
    """`x` in float64, where the device has it, in which the squares of numbers of any other dtype are in range."""
    least = torch.float32 if x.device.type == "mps" else torch.float64
    return x.to(torch.promote_types(x.dtype, least))


def multiple(x: Tensor, m: Tensor) -> Tensor:
    """`x` times `m`; where that is a mask, zero outside of it, also where x is no number there."""
    return x.masked_fill(~m, 0) if m.dtype == torch.bool else x * m


def weighted_pair(g: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a product, the smaller one weighted: the copy of a language model's logits is worth saving."""
    if prod(g.shape[1:]) <= prod(x.shape[1:]):
        return weighted(g, weights), x
    return g, weighted(x, weights)


def square(x: Tensor) -> Tensor:
    """|x|^2 elementwise, real."""
    return real(x * x.conj()) if x.is_complex() else x * x


# elements whose squares are added without a copy of them, in plain float32: few enough that rounding does not add up
RUN = 1024


def squared_norms(g: Tensor) -> Tensor:
    """(b,): the squared norm of each row of g (b, ...), accumulated in at least float32."""
    g = flat(g)
    whole = g.shape[1] // RUN
    if whole < 32 or not may_write(g):
        return square(accumulable(g)).sum(1)
    runs = g[:, : whole * RUN].unflatten(1, (whole, RUN))
    wide = accumulable(g[:0]).dtype
    return torch.linalg.vector_norm(runs, dim=2, dtype=wide).square().sum(1) + square(
        accumulable(g[:, whole * RUN :])
    ).sum(1)


def real(x: Tensor) -> Tensor:
    """The real part: the inner product of complex gradients as real ones."""
    return x.real if x.is_complex() else x


def dots(g: Tensor, h: Tensor) -> Tensor:
    """(b,): the inner products of g and h, each (b, ...)."""
    return flat(real(accumulable(g) * accumulable(h).conj())).sum(1)


# terms of a product that a BLAS adds up at a time: over millions, some keep three digits of float32
_TERMS = 1 << 16


def products(g: Tensor, h: Tensor) -> Tensor:
    """(b, c): the inner products of all rows of g (b, ...) with all of h (c, ...)."""
    g, h = accumulable(flat(g)), accumulable(flat(h)).mH
    return total(real(g[:, s] @ h[s]) for s in runs(g.shape[1], _TERMS))


def gather(parts: list[Tensor]) -> Tensor:
    """Parts along the batch, as one."""
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def total(parts: Iterator[Tensor]) -> Tensor:
    """The sum of parts, one at a time."""
    result = next(parts)
    for part in parts:
        result = result + part
    return result


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of parts of one shape, in the widest of their dtypes."""
    if len(parts) == 1:
        return parts[0]
    widest = functools.reduce(torch.promote_types, (p.dtype for p in parts))
    return torch.stack([p.to(widest) for p in parts]).sum(0)


def into(out: Tensor | None, rows: Tensor) -> Tensor:
    """`rows`, copied into `out` where that is given."""
    return rows if out is None else out.copy_(rows)
