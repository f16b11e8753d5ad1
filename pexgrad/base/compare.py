"""When two computations of the same numbers agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .numerics import in_pieces, is_half

# Relative errors above which a difference is not rounding. Measured on networks of 20 to 50 layers: up to 1e-6 for
# float32, 4e-3 for TF32 (simulated; convolutions use it by default where a device has it), 0.07 for half precision.
DOUBLE, SINGLE, TF32, HALF = 1e-7, 5e-3, 3e-2, 0.1


def tolerance(t: Tensor, half: bool = False) -> float:
    """The largest relative error that counts as rounding for `t`; with `half`, intermediate values were in half precision."""
    if half or is_half(t.dtype) or torch.is_autocast_enabled(t.device.type):
        return HALF
    if t.dtype.to_real() == torch.float64:
        return DOUBLE
    return SINGLE if t.device.type == "cpu" else TF32


# Rounding may decide a branch: a unit that is zero but for rounding is on in one computation and off in the other, and the
# gradient of its layer differs by the unit's share of it. Seen in 3 of 150 ResNet-18 on images of 32 x 32, with errors of 0.01
# to 0.05. At slightly different parameters the unit is on or off in both, while a trace that is wrong is wrong there too.
_BRANCHES, _NEARBY = 0.3, (0.01, 0.02)


def agree_nearby(error: float, agree: Callable[[float], bool]) -> bool:
    """Whether an error is small enough to come from a branch, and vanishes where parameters are changed slightly.

    `agree(part)` says whether the results agree at parameters that are changed by that part of themselves.
    """
    return error <= _BRANCHES and any(map(agree, _NEARBY))


# Some gradients are nothing but rounding. Where parameters are rounded otherwise, these move by a large part of their size
# (_PART or more), and yet by little (at most _ROUNDINGS roundings of the number 1: a larger move is that of a branch). For them
# a difference of a few such moves (TIMES) is rounding too. Not in half precision, where any rounding is a large part.
_PART, _ROUNDINGS, TIMES = 0.1, 1e4, 30


def moved(t: Tensor, part: float) -> Tensor:
    """`t` with its numbers made smaller and larger in turn, each by that part of itself."""
    signs = torch.ones(t.numel(), device=t.device)
    signs[::2] = -1
    return t * (1 + (part * signs.reshape(t.shape)).to(t.dtype))


def largest_error(
    got: dict[str, Tensor], want: dict[str, Tensor], half: bool = False
) -> tuple[str, float] | None:
    """The entry with the largest relative error, if that is more than rounding (see `tolerance`)."""
    differences = Differences(half)
    for k, w in want.items():
        differences.add(k, got[k], w)
    return differences.largest()


class Differences:
    """How far entries are from what they should be; each may be given in several parts, such as the rows of single examples."""

    def __init__(self, half: bool = False):
        self._half = half
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, got: Tensor, want: Tensor, rounded: Tensor | None = None) -> None:
        """Compare a part of an entry; `rounded` is `want` once more, computed from parameters that are rounded otherwise."""
        entry = self._entries.setdefault(name, _Entry(tolerance(want, self._half), want.dtype))
        norm = _joined(in_pieces(want))
        entry.is_finite &= math.isfinite(norm) or bool(want.isfinite().all())
        entry.norm = math.hypot(entry.norm, norm if math.isfinite(norm) else _finite_norm(want))
        entry.difference = math.hypot(entry.difference, _difference(got, want))
        if rounded is not None:
            entry.moved = math.hypot(entry.moved, _finite_norm(rounded - want))

    def largest(self) -> tuple[str, float] | None:
        """The entry with the largest relative error, if that is more than rounding."""
        overall = math.hypot(*(entry.norm for k, entry in self._entries.items() if k))
        worst: tuple[str, float] | None = None
        for k, entry in self._entries.items():
            # a gradient that is zero but for rounding is measured against all gradients together
            error = entry.difference / max(entry.norm, 1e-4 * overall if k else 0.0, 1e-12)
            within = error <= entry.tolerance or entry.differs_by_rounding()
            if not within and (worst is None or error > worst[1]):
                worst = k, error
        return worst

    def are_of_numbers(self) -> bool:
        """Whether all that entries should be is finite."""
        return all(entry.is_finite for entry in self._entries.values())

    def telling(self) -> set[str]:
        """The entries that should be finite numbers other than zero."""
        return {k for k, entry in self._entries.items() if entry.is_finite and entry.norm}


@dataclass
class _Entry:
    """What is known of an entry: norms of all its parts together."""

    tolerance: float
    dtype: torch.dtype
    is_finite: bool = True
    norm: float = 0.0
    difference: float = 0.0
    moved: float = 0.0  # by other rounding of the parameters

    def differs_by_rounding(self) -> bool:
        if is_half(self.dtype) or not self.moved:
            return False
        few = _PART * self.norm <= self.moved <= _ROUNDINGS * torch.finfo(self.dtype).eps
        return few and self.difference <= TIMES * self.moved


def _difference(got: Tensor, want: Tensor) -> float:
    """The norm of the difference of the numbers that are finite; infinity where these, or the shapes, are not the same."""
    if got.shape != want.shape:
        return math.inf
    difference = _joined(a - b for a, b in zip(in_pieces(got), in_pieces(want), strict=True))
    if math.isfinite(difference):
        return difference
    # both have their infinities and NaN in the same places, or the difference is out of the range of their own dtype
    if not torch.equal(got.isfinite(), want.isfinite()):
        return math.inf
    return _finite_norm(got.to(_wide(want)) - want.to(_wide(want)))


def _finite_norm(x: Tensor) -> float:
    return _joined(torch.where(p.isfinite(), p, 0) for p in in_pieces(x))


def _joined(pieces: Iterable[Tensor]) -> float:
    """The norm of all numbers of the pieces."""
    return math.hypot(*map(_norm, pieces))


# norms in float32 of which the squares are well within its range: it takes a fifth of the time
_SMALL, _LARGE = 1e-15, 1e15


def _norm(x: Tensor) -> float:
    if x.dtype.to_real() == torch.float32:
        norm = float(torch.linalg.vector_norm(x))
        if _SMALL < norm < _LARGE:
            return norm
    return float(torch.linalg.vector_norm(x, dtype=_wide(x)))


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64
