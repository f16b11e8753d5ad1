"""The weight of each example's gradient in a clipped sum, from its norm.

For the sum over examples of w_b g_b to have bounded sensitivity C, what one example adds to it must have norm at most C:

    flat           w_b = 1 / max(1, |g_b| / C)                    Abadi et al. 2016, arXiv 1607.00133, algorithm 1
    per_parameter  the same for each of n parameters, with C / sqrt(n)
    groups         the same for each group of parameters, with a bound of its own
    automatic      w_b = C / (|g_b| + 0.01)                       AUTO-S, Bu et al. 2022, arXiv 2206.07136
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ..base.checks import positive, shaped
from ..errors import InputError
from .jacobian import Jacobian

Clip = str | Callable[[Tensor], Tensor]
CLIPS = ("flat", "per_parameter", "automatic")
_AUTOMATIC_STABILITY = 0.01


@dataclass(frozen=True)
class Clipping:
    """A way to clip and its bounds."""

    max_norm: float | Mapping[str, float] | None
    how: Clip = "flat"

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, Mapping):
            if self.how != "flat":
                raise InputError(f"max_norm by group and clip={self.how!r} exclude one another")
            # a copy: the sensitivity that was accounted for stays what it is, whatever becomes of the user's dict
            bounds = {str(p): positive(bound, f"max_norm[{p!r}]") for p, bound in self.max_norm.items()}
            if len(bounds) < len(self.max_norm):
                raise InputError("max_norm has two bounds for one group: as a number and as its name")
            object.__setattr__(self, "max_norm", bounds)
        elif callable(self.how):
            if self.max_norm is not None:
                raise InputError(
                    "with a function for clip, which gives the weights itself, leave max_norm out"
                )
        elif self.how not in CLIPS:
            raise InputError(
                f"clip={self.how!r} is neither a function nor one of {', '.join(map(repr, CLIPS))}"
            )
        elif self.max_norm is None:
            raise InputError("max_norm is missing: the bound on the norm of each example's gradient")
        else:
            object.__setattr__(self, "max_norm", positive(self.max_norm, "max_norm"))

    @property
    def sensitivity(self) -> float | None:
        """The largest norm that one example can add to the sum; None where a function gives the weights."""
        if isinstance(self.max_norm, Mapping):
            return sum(c * c for c in self.max_norm.values()) ** 0.5
        return self.max_norm

    def weights(self, jacobian: Jacobian) -> tuple[Tensor | dict[str, Tensor], Tensor]:
        """The weights, (B,) or by parameter, and the norms (B,) over all parameters."""
        if isinstance(self.max_norm, Mapping):
            return self._grouped(jacobian, self._groups(list(jacobian.leaves)))
        if self.how == "per_parameter":
            assert self.max_norm is not None
            bound = self.max_norm / max(1, len(jacobian.leaves)) ** 0.5
            return self._grouped(jacobian, [([k], bound) for k in jacobian.leaves])
        norms = jacobian.norms()
        assert isinstance(norms, Tensor)
        return self._flat(norms), norms

    def _flat(self, norms: Tensor) -> Tensor:
        if callable(self.how):
            weights = self.how(norms.clone())  # it may work in place
            shaped(weights, norms.shape, "what clip returned", "one weight for each example")
            return weights
        assert self.max_norm is not None and not isinstance(self.max_norm, Mapping)
        if self.how == "automatic":
            return self.max_norm / (norms + _AUTOMATIC_STABILITY)
        return bounded(norms, self.max_norm)

    def _groups(self, names: list[str]) -> list[tuple[list[str], float]]:
        assert isinstance(self.max_norm, Mapping)
        found: dict[str, list[str]] = {pattern: [] for pattern in self.max_norm}
        for name in names:
            matching = [
                p for p in self.max_norm if p == name or name.startswith(p + ".") or fnmatchcase(name, p)
            ]
            if len(matching) != 1:
                raise InputError(
                    f"parameter '{name}' is in {len(matching)} groups of max_norm ({', '.join(matching) or 'none'}); "
                    "each must be in exactly one, by name, module path or pattern"
                )
            found[matching[0]].append(name)
        for pattern, members in found.items():
            if not members:
                raise InputError(
                    f"max_norm[{pattern!r}] is a bound for no parameter that is differentiated, and would add to the "
                    f"sensitivity; leave it out, or name some of {', '.join(map(repr, names[:8]))}"
                )
        return [(members, self.max_norm[p]) for p, members in found.items()]

    @staticmethod
    def _grouped(
        jacobian: Jacobian, groups: list[tuple[list[str], float]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        own = jacobian.norms(per_param=True)
        assert isinstance(own, dict)
        weights, squares = {}, []
        for members, bound in groups:
            sq = torch.stack([own[k] ** 2 for k in members]).sum(0)
            weights |= dict.fromkeys(members, bounded(sq.sqrt(), bound))
            squares.append(sq)
        return weights, torch.stack(squares).sum(0).sqrt() if squares else jacobian.norms()  # type: ignore[return-value]


def bounded(norms: Tensor, bound: float) -> Tensor:
    """(B,): the weights that scale gradients of these norms down to `bound`."""
    return 1 / torch.clamp(norms / bound, min=1)
