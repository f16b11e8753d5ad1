"""Where the elements of strided tensors lie, and whether they share any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, strided

from ..errors import InputError


def storage_of(t: Tensor) -> int | None:
    """An identity of the memory behind a tensor; None where it is not one piece."""
    return t.untyped_storage()._cdata if t.layout is strided else None


def is_injective(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether every element is certainly shown once: each dimension steps over all that the smaller ones reach."""
    if 0 in size:
        return True
    reach = 0
    for n, s in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda d: d[1]):
        if s <= reach:
            return False
        reach += s * (n - 1)
    return True


def room_for_rows(out: Any, entries: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
    """The first B rows of the buffers in `out`, which need one for every entry (*shape), (B or more, *shape)."""
    if not isinstance(out, Mapping):
        raise InputError(f"out is a {type(out).__name__}; expected the rows of an earlier call, by name")
    found = {}
    for k, p in entries.items():
        t = out.get(k)
        if not isinstance(t, Tensor):
            raise InputError(f"out has no buffer for '{k}'; pass the rows of an earlier call")
        fits = t.shape[1:] == p.shape and t.dim() > p.dim() and t.shape[0] >= batch and t.dtype == p.dtype
        if not fits or t.requires_grad or t.layout is not strided:
            raise InputError(
                f"out[{k!r}] is {tuple(t.shape)} {t.dtype}; expected ({', '.join(map(str, (f'{batch} or more', *p.shape)))}) "
                f"{p.dtype} without requires_grad"
            )
        found[k] = t[:batch]
    return found


def refuse_shared(out: Mapping[str, Tensor], read: Iterable[tuple[str, Tensor]]) -> None:
    """Raise where rows written into `out` would be written over one another, or over what they are computed from."""
    held: dict[int | None, list[tuple[str, Tensor]]] = {storage_of(t): [] for t in out.values()}
    for what, t in read:
        if (storage := storage_of(t)) in held:
            held[storage].append((what, t))
    for k, t in out.items():
        if not (t.is_contiguous() or is_injective(t.shape, t.stride())):
            raise InputError(
                f"out[{k!r}] may show one element in several places: rows would be written over one another"
            )
        held[storage_of(t)].append((f"out[{k!r}]", t))
    written = set(map(id, out.values()))
    for beside in held.values():
        pair = _clash(beside, written) if len(beside) > 1 else None
        if pair is not None:
            raise InputError(f"{pair[0]} and {pair[1]} may share memory")


def _clash(tensors: list[tuple[str, Tensor]], written: set[int]) -> tuple[str, str] | None:
    """The names of two tensors in one storage, one of them written to, that may share elements."""
    tensors = [(name, t) for name, t in tensors if t.numel()]
    active: list[tuple[int, str, Tensor]] = []
    for (start, stop), name, t in sorted(_places(tensors), key=lambda place: place[0]):
        active = [a for a in active if a[0] > start]
        for _, other, u in active:
            if (id(t) in written or id(u) in written) and overlap(t, u):
                return name, other
        active.append((stop, name, t))
    return None


def _places(tensors: list[tuple[str, Tensor]]) -> list[tuple[tuple[int, int], str, Tensor]]:
    """The bytes that each lies in; for columns of one matrix, which all reach over one another, those of a line."""
    pitches = {t.stride(0) * t.element_size() if t.dim() else 0 for _, t in tensors}
    pitch = pitches.pop() if len(pitches) == 1 else 0
    if pitch:
        lines = [(_reach(t[0]), name, t) for name, t in tensors]
        if all(start // pitch == (stop - 1) // pitch for (start, stop), _, _ in lines):
            return [
                ((start % pitch, start % pitch + stop - start), name, t) for (start, stop), name, t in lines
            ]
    return [(_reach(t), name, t) for name, t in tensors]


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in one storage may share elements: not if one ends before the other, nor as columns of a matrix."""
    if not a.numel() or not b.numel():
        return False
    (start, stop), (first, last) = _reach(a), _reach(b)
    if stop <= first or last <= start:
        return False
    if not a.dim() or not b.dim() or a.dtype != b.dtype or a.stride(0) != b.stride(0) or not a.stride(0):
        return True
    pitch = a.stride(0) * a.element_size()
    (start, stop), (first, last) = _reach(a[0]), _reach(b[0])
    apart = (first - start) % pitch
    if stop - start <= apart and apart + (last - first) <= pitch:
        return False
    # lines that begin in one place are told apart as tensors of their own, where none is longer than a pitch
    same_line = start // pitch == (stop - 1) // pitch == first // pitch == (last - 1) // pitch
    return not same_line or overlap(a[0], b[0])


def _reach(t: Tensor) -> tuple[Any, Any]:
    """The first byte and the one after the last."""
    steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    start = t.storage_offset() * t.element_size()
    return start, start + (steps + 1) * t.element_size()
