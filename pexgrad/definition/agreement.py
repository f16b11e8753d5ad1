"""Whether all that an operator answers is what its rows should give: what the public checks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base.numerics import flat, is_inexact, real, weighted
from ..errors import VerificationError
from ..operator.clipping import Clipping
from ..operator.jacobian import Jacobian

Compare = Callable[[str, Any, Tensor], None]


def doubled(t: Tensor) -> Tensor:
    """`t` in double precision, real or complex; integers and booleans as they are."""
    wide = torch.complex128 if t.is_complex() else torch.float64
    return t.detach().to(wide) if is_inexact(t) else t.detach()


def refuse_difference(jacobian: Jacobian, losses: Tensor, want: dict[str, Tensor], tolerance: float) -> None:
    """Raise where losses, rows, norms, sums or products differ from the definition's by a larger relative error.

    `want` are the definition's rows, in float64; all else is computed from them.
    """
    whole = torch.cat([flat(w) for w in want.values()], 1)
    # a gradient that is zero but for rounding is measured against all gradients together
    floor = max(1e-4 * float(whole.norm()), 1e-12)

    def compare(what: str, got: Any, want: Tensor) -> None:
        _compare(what, got, want, tolerance * max(1.0, floor / max(float(want.norm()), 1e-12)))

    compare("the losses", jacobian.losses, losses)
    rows = jacobian.rows()
    for k, w in want.items():
        compare(f"the rows of '{k}'", rows[k], w)
    compare("the norms", jacobian.norms(), whole.norm(dim=1))
    compare("the inner products", jacobian.gram(), real(whole @ whole.mH))
    direction = {k: torch.ones_like(p) for k, p in jacobian.leaves.items()}
    compare("the products with a direction", jacobian @ direction, real(whole.sum(1)))
    _compare_sums(compare, jacobian, want, whole.norm(dim=1))


def _compare_sums(compare: Compare, jacobian: Jacobian, want: dict[str, Tensor], norms: Tensor) -> None:
    weights = torch.linspace(-1, 1, len(norms), dtype=torch.float64, device=norms.device)
    for k, total in jacobian.vjp(weights).items():
        compare(f"the weighted sum of '{k}'", total, weighted(want[k], weights).sum(0))
    bound = max(float(norms.mean()), 1e-9)
    kept = jacobian.keep()  # as a clipped sum does
    for k, total in kept.vjp(Clipping(bound).weights(kept)[0]).items():
        clipped = weighted(want[k], 1 / torch.clamp(norms / bound, min=1))
        compare(f"the clipped sum of '{k}'", total, clipped.sum(0))


def _compare(what: str, got: Any, want: Tensor, tolerance: float) -> None:
    if got.shape != want.shape:
        raise VerificationError(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    error = float((got - want).norm() / want.norm().clamp(min=1e-12))
    if not error <= tolerance:
        raise VerificationError(f"{what} differ from the definition by a relative error of {error:.1e}")
