"""Where the elements of strided tensors lie, and whether they share any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def is_injective(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether every element is shown once: each dimension steps over all that the smaller ones reach."""
    reach = 0
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda d: d[1]):
        if s <= reach:
            return False
        reach += s * (n - 1)
    return True


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in one storage may share elements: not if one ends before the other, nor as columns of a matrix."""
    if not a.numel() or not b.numel():
        return False
    (start, stop), (first, last) = _reach(a), _reach(b)
    if stop <= first or last <= start:
        return False
    pitch = a.stride(0) if a.dim() else 0
    if not pitch or not b.dim() or b.stride(0) != pitch or a.dtype != b.dtype:
        return True
    (start, stop), (first, last) = _reach(a[0]), _reach(b[0])
    bytes_of_row, apart = pitch * a.element_size(), first - start
    apart %= bytes_of_row
    return not (stop - start <= apart and apart + (last - first) <= bytes_of_row)


def _reach(t: Tensor) -> tuple[Any, Any]:
    """The first byte and the one after the last."""
    steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    start = t.storage_offset() * t.element_size()
    return start, start + (steps + 1) * t.element_size()
