"""When two computations of the same numbers agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .numerics import is_half

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
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    half: bool = False,
    rounded: dict[str, Tensor] | None = None,
) -> tuple[str, float] | None:
    """The entry with the largest relative error, if that is more than rounding (see `tolerance`).

    `rounded` is `want` once more, computed from parameters that are rounded otherwise.
    """
    norms = {k: _norm(w) for k, w in want.items()}
    overall = math.hypot(*(n for k, n in norms.items() if k))
    worst: tuple[str, float] | None = None
    for k, w in want.items():
        if got[k].shape != w.shape:
            return k, math.inf
        difference = _distance(got[k], w)
        if not math.isfinite(difference):  # then both have their infinities and NaN in the same places
            if not torch.equal(got[k].isfinite(), w.isfinite()):
                return k, math.inf
            # of the finite numbers, whose difference may be out of the range of their own dtype
            difference = _norm(got[k].to(_wide(w)) - w.to(_wide(w)))
        # a gradient that is zero but for rounding is measured against all gradients together
        scale = max(norms[k], 1e-4 * overall if k else 0.0, 1e-12)
        if rounded is not None and not is_half(w.dtype) and _is_rounding(difference, w, rounded[k]):
            continue
        error = difference / scale
        if not error <= tolerance(w, half) and (worst is None or error > worst[1]):
            worst = k, error
    return worst


def is_finite(x: Tensor) -> bool:
    """Whether all numbers of `x` are finite. A finite sum proves it; else each is looked at, since a sum may overflow."""
    return all(bool(p.sum().isfinite()) or bool(p.isfinite().all()) for p in _pieces(x))


def _is_rounding(difference: float, want: Tensor, rounded: Tensor) -> bool:
    own = _norm(rounded - want)
    few = _PART * _norm(want) <= own <= _ROUNDINGS * torch.finfo(want.dtype).eps
    return few and difference <= TIMES * own


def _norm(x: Tensor) -> float:
    """The norm of the numbers that are finite."""
    norm = _joined(_pieces(x))
    return norm if math.isfinite(norm) else _joined(torch.where(p.isfinite(), p, 0) for p in _pieces(x))


def _distance(x: Tensor, y: Tensor) -> float:
    """The norm of the difference of two tensors of one shape."""
    return _joined(a - b for a, b in zip(_pieces(x), _pieces(y), strict=True))


# elements that are compared at a time: for rows of a large model as a whole, a copy in float64 would take twice their memory
_PIECE = 1 << 20


def _pieces(x: Tensor) -> Iterator[Tensor]:
    return (p for p in x.reshape(-1).split(_PIECE) if p.numel())


def _joined(pieces: Iterable[Tensor]) -> float:
    """The norm of all numbers of the pieces."""
    return math.hypot(*[float(torch.linalg.vector_norm(p, dtype=_wide(p))) for p in pieces])


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64
