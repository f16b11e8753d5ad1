"""A factor of a result summed to that of an operand which is repeated in it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ._base import Factor
from .broadcast import Broadcast, repeats_as_positions


def summed_to(factor: Factor, shape: tuple[int, ...]) -> Factor | None:
    """The factor whose rows are those of another, summed to (*shape) as broadcasting repeats it; None where that takes rows."""
    if tuple(factor.shape) == shape:
        return factor
    own = (1,) * (len(factor.shape) - len(shape)) + shape
    if isinstance(factor, Broadcast):
        whole = factor.shape
        return replace(factor.mapped(lambda v: repeats_as_positions(v.unflatten(2, whole), own)), shape=shape)
    sums = _sums(factor, own)
    return None if sums is None else Broadcast(sums.unsqueeze(1), None, shape, factor.dtype)


def _sums(factor: Factor, own: tuple[int, ...]) -> Tensor | None:
    """(b, n): one for each place of a dimension, or one of all; None where there are several dimensions."""
    kept = [d for d, n in enumerate(own) if n != 1]
    if factor.is_replayed or factor.dtype.is_complex or len(kept) > 1:
        return None
    ones = factor.numbers.new_ones(()).expand(factor.shape)
    if not kept:
        return factor.dot(ones).unsqueeze(1)
    return factor.dots_along(ones, kept[0]) if own[kept[0]] == factor.shape[kept[0]] else None
