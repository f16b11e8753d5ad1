"""When two computations of the same numbers agree."""

from __future__ import annotations

import torch
from torch import Tensor

# relative errors above which a difference is not rounding
TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 5e-3, torch.complex64: 5e-3}
HALF = 0.1


def largest_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[str, float] | None:
    """The entry with the largest relative error, if that is more than rounding."""
    overall = sum(float(w.abs().double().square().nan_to_num().sum()) for k, w in want.items() if k) ** 0.5
    worst: tuple[str, float] | None = None
    for k, w in want.items():
        # a gradient that is zero but for rounding is measured against all gradients together
        scale = max(_norm(w), 1e-4 * overall if k else 0.0, 1e-12)
        error = _norm(torch.where(w.isfinite(), got[k] - w, 0)) / scale
        if not error <= TOLERANCE.get(w.dtype, HALF) and (worst is None or error > worst[1]):
            worst = k, error
    return worst


def _norm(x: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(x.to(torch.complex128 if x.is_complex() else torch.float64).nan_to_num())
    )
