"""The per-example Jacobian as an unevaluated linear operator: J[b] = dL_b / d(parameters)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .factors import Factor, Rows
from .factors.joined import join
from .pullback import Window, vjp, vjp_rows
from .sites import Operand


@dataclass(frozen=True, eq=False)
class Term:
    """One derived value and the factor of its uses."""

    value: Tensor
    params: tuple[str, ...]
    window: Window | None
    factor: Factor

    def rows(self, leaves: dict[str, Tensor], create_graph: bool) -> Iterator[tuple[str, Tensor]]:
        """(name, (b, *shape)): what this term adds to each parameter's rows."""
        rows = self.factor.rows()
        if self.window is not None:
            yield self.window.param, self.window.rows(rows, leaves[self.window.param])
        else:
            yield from vjp_rows(self.value, leaves, self.params, rows, create_graph)

    def weighted_sum(self, leaves: dict[str, Tensor], weights: Tensor, create_graph: bool) -> Iterator[tuple[str, Tensor]]:
        """(name, (*shape)): what this term adds to each parameter's weighted sum."""
        total = self.factor.weighted_sum(weights)
        if self.window is not None and self.window.whole:
            yield self.window.param, total
        else:
            yield from vjp(self.value, leaves, self.params, total, create_graph)


@dataclass(frozen=True, eq=False)
class Jacobian:
    """J, of shape batch x parameters, as `losses` (B,) and the terms of each parameter."""

    losses: Tensor
    leaves: dict[str, Tensor]  # the parameters, in the order of the result
    terms: list[Term]
    create_graph: bool = False

    @classmethod
    def of_rows(cls, losses: Tensor, rows: dict[str, Tensor]) -> Jacobian:
        """An operator around rows that exist already."""
        leaves = {k: r.new_empty(r.shape[1:]) for k, r in rows.items()}
        terms = [
            Term(leaves[k], (k,), Window(k, tuple(r.shape[1:]), (), 0, True, True), Rows(r)) for k, r in rows.items()
        ]
        return cls(losses, leaves, terms)

    @property
    def batch(self) -> int:
        """The number of examples."""
        return self.losses.shape[0]

    def rows(self) -> dict[str, Tensor]:
        """name -> (B, *shape)."""
        found: dict[str, Tensor] = {}
        for term in self.terms:
            for k, r in term.rows(self.leaves, self.create_graph):
                found[k] = found[k] + r if k in found else r
        return {k: found[k] if k in found else p.new_zeros(self.batch, *p.shape) for k, p in self.leaves.items()}

    def vjp(self, weights: Tensor) -> dict[str, Tensor]:
        """name -> (*shape): sum over b of weights[b] times row b."""
        found: dict[str, Tensor] = {}
        for term in self.terms:
            for k, g in term.weighted_sum(self.leaves, weights, self.create_graph):
                found[k] = found[k] + g if k in found else g
        return {k: found[k] if k in found else torch.zeros_like(p) for k, p in self.leaves.items()}

    def norms(self) -> Tensor:
        """(B,): |J[b]|."""
        rows = self.rows().values()
        sq = [Rows(r).sq_norms() for r in rows if r.numel()]
        return torch.stack(sq).sum(0).sqrt() if sq else self.losses.new_zeros(self.batch)


def join_uses(uses: list[tuple[Operand, Tensor, Factor, Window | None]]) -> list[Term]:
    """One term for each value and kind of factor: uses of one weight over time become one factor along time."""
    grouped: dict[tuple[int, type[Factor]], list[tuple[Operand, Tensor, Factor, Window | None]]] = {}
    for use in uses:
        grouped.setdefault((id(use[1]), type(use[2])), []).append(use)
    terms = []
    for same in grouped.values():
        operand, value, _, window = same[0]
        terms += [Term(value, operand.params, window, f) for f in join([u[2] for u in same])]
    return terms
