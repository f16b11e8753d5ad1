"""Parameters that must be looked at together, and the algebra of their terms.

A *term* is one derived value with the factor of its uses. Terms that are windows into a parameter (the parameter itself, a
transpose, a slice) keep norms and inner products, so those come from the factors in closed form, cross terms
included. Where a term is computed from parameters in any other way, the rows of the parameters it
reaches are built, a bounded number of examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from .factors import PIECE_BYTES, Factor, Rows
from .factors._base import accumulable, flat, square
from .pullback import Window, jvp, vjp, vjp_rows


@dataclass(frozen=True, eq=False)
class Term:
    """One derived value and the factor of its uses."""

    value: Tensor
    params: tuple[str, ...]
    window: Window | None
    factor: Factor

    def narrow(self, start: int, length: int) -> Term:
        """The same for some of the examples."""
        return replace(self, factor=self.factor.narrow(start, length))


@dataclass(frozen=True, eq=False)
class Component:
    """Parameters connected by terms, with the leaves that the terms are differentiated to."""

    leaves: dict[str, Tensor]
    terms: list[Term]
    create_graph: bool

    @property
    def batch(self) -> int:
        """The number of examples."""
        return self.terms[0].factor.batch

    def narrow(self, start: int, length: int) -> Component:
        """The same for some of the examples."""
        return replace(self, terms=[t.narrow(start, length) for t in self.terms])

    def rows(self, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """name -> (b, *shape), written into `out` where that is given."""
        if out is not None and len(self.terms) == 1 and self._is_whole(self.terms[0]):
            (name,) = self.leaves
            return {name: self.terms[0].factor.rows(out[name])}
        found: dict[str, Tensor] = {}
        for term in self.terms:
            for k, r in self._term_rows(term):
                found[k] = found[k] + r if k in found else r
        full = {
            k: found[k] if k in found else p.new_zeros(self.batch, *p.shape) for k, p in self.leaves.items()
        }
        return full if out is None else {k: out[k].copy_(r) for k, r in full.items()}

    def _is_whole(self, term: Term) -> bool:
        return term.window is not None and term.window.whole

    def _term_rows(self, term: Term) -> Iterator[tuple[str, Tensor]]:
        rows = term.factor.rows()
        if term.window is not None:
            yield term.window.param, term.window.rows(rows, self.leaves[term.window.param])
        else:
            yield from vjp_rows(term.value, self.leaves, term.params, rows, self.create_graph)

    def vjp(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """name -> (*shape): sum over b of weights[name][b] times row b."""
        found: dict[str, Tensor] = {}
        for term in self.terms:
            for k, g in self._term_vjp(term, weights):
                found[k] = found[k] + g if k in found else g
        return {k: found[k] if k in found else torch.zeros_like(p) for k, p in self.leaves.items()}

    def _term_vjp(self, term: Term, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self._is_whole(term):
            (name,) = term.params
            yield name, term.factor.weighted_sum(weights[name])
            return
        distinct = {id(weights[k]): weights[k] for k in term.params}
        for key, w in distinct.items():
            names = tuple(k for k in term.params if id(weights[k]) == key)
            yield from vjp(term.value, self.leaves, names, term.factor.weighted_sum(w), self.create_graph)

    def dot(self, v: dict[str, Tensor]) -> Tensor:
        """(b,): the inner product of each row with `v`."""
        parts = []
        for term in self.terms:
            if term.window is not None:
                tangent = term.window.of(v[term.window.param], self.leaves[term.window.param])
            else:
                tangent = jvp(term.value, self.leaves, term.params, v, self.create_graph)
            parts.append(term.factor.dot(tangent))
        return torch.stack(parts).sum(0)

    # --- squares and inner products -----------------------------------------------------------------

    def windows(self) -> dict[Window, list[Factor]] | None:
        """The factors by window, where inner products can be taken between factors; None where rows are needed."""
        found: dict[Window, list[Factor]] = {}
        for term in self.terms:
            if term.window is None or not term.window.isometric:
                return None
            found.setdefault(term.window, []).append(term.factor)
        if any(not a.disjoint(b) for a, b in combinations(found, 2)):
            return None
        return found

    def sq_norms(self) -> dict[str, Tensor]:
        """name -> (b,): squared norms, by parameter."""
        windows = self.windows()
        if windows is None:
            return self._by_rows(lambda r: square(accumulable(flat(r))).sum(1))
        (name,) = self.leaves
        parts = []
        for same in windows.values():
            parts += [f.sq_norms() for f in same]
            parts += [2 * f.inner(g) for f, g in combinations(same, 2)]
        # rounding in cross terms can leave a square a little below zero
        return {name: parts[0] if len(parts) == 1 else torch.stack(parts).sum(0).clamp(min=0)}

    def _by_rows(self, reduce_row) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
        parts: dict[str, list[Tensor]] = {k: [] for k in self.leaves}
        for s in self._slices():
            for k, r in self.narrow(s.start, s.stop - s.start).rows().items():
                parts[k].append(reduce_row(r))
        return {k: torch.cat(p) for k, p in parts.items()}

    def _slices(self) -> Iterator[slice]:
        if isinstance(self.batch, torch.SymInt):  # a graph for every batch size has no loop over it
            yield slice(0, self.batch)
            return
        size = max(1, PIECE_BYTES // max(1, sum(p.numel() * p.element_size() for p in self.leaves.values())))
        for start in range(0, self.batch, size):
            yield slice(start, min(start + size, self.batch))

    def sum_squares(self) -> dict[str, Tensor]:
        """name -> (*shape): the sum over b of the squared rows, elementwise."""
        if len(self.terms) == 1 and self.terms[0].window is not None and self.terms[0].window.isometric:
            window, squares = self.terms[0].window, self.terms[0].factor.sum_squares()
            return {window.param: window.rows(squares[None], self.leaves[window.param])[0]}
        found: dict[str, Tensor] = {}
        for s in self._slices():
            for k, r in self.narrow(s.start, s.stop - s.start).rows().items():
                squares = square(r).sum(0)
                found[k] = found[k] + squares if k in found else squares
        return found

    def gram(self, other: Component) -> Tensor:
        """(b, c): the inner products of rows with the rows of another call's component of the same parameters."""
        mine, theirs = self.windows(), other.windows()
        if mine is None or theirs is None or not _match(mine, theirs):
            rows, others = self.rows(), other.rows()
            parts = [Rows(rows[k]).gram(Rows(others[k])) for k in rows]
        else:
            parts = [f.gram(g) for w in mine for f in mine[w] for g in theirs.get(w, [])]
        shape = (self.batch, other.batch)
        return torch.stack(parts).sum(0) if parts else self.terms[0].value.new_zeros(shape)


def _match(mine: dict[Window, list[Factor]], theirs: dict[Window, list[Factor]]) -> bool:
    return all(a == b or a.disjoint(b) for a in mine for b in theirs)


def components(leaves: dict[str, Tensor], terms: list[Term], create_graph: bool) -> list[Component]:
    """Group terms that reach a common parameter; parameters that no term reaches are in none."""
    groups: list[tuple[set[str], list[Term]]] = []
    for term in terms:
        touching = [g for g in groups if g[0] & set(term.params)]
        names = set(term.params).union(*(g[0] for g in touching))
        merged = [t for g in touching for t in g[1]] + [term]
        groups = [g for g in groups if g not in touching] + [(names, merged)]
    return [
        Component({k: p for k, p in leaves.items() if k in names}, own, create_graph) for names, own in groups
    ]
