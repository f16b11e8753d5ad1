"""Parameters that must be looked at together, and the algebra of their terms.

A *term* is one derived value with the factor of its uses. Terms that are windows into a parameter (the parameter itself, a
transpose, a slice) have the norms and inner products of the factors themselves, in closed form, cross terms
included. Where a term is computed from parameters in any other way, the rows of the parameters it
reaches are built, a bounded number of examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from ..base.doubts import answers, may_ask
from ..base.fakes import is_recorded
from ..base.numerics import accumulable, square, squared_norms, sum_of
from ..factors import BLOCK_BYTES, Factor, Outer, Rows, cancels, slices
from .paths import Path
from .pullback import Window, is_linear, jvp, vjp, vjp_rows


@dataclass(frozen=True, eq=False)
class Term:
    """One derived value and the factor of its uses."""

    value: Tensor
    params: tuple[str, ...]
    window: Window | None
    factor: Factor
    paths: tuple[Path, ...] = ()  # on which the factor may go on to the parameters

    def along_paths(self, values: Mapping[fx.Node, Any]) -> list[Term]:
        """Terms of the parameters themselves, where the factor stays a factor on the way to each; else this one."""
        if self.window is not None or not self.paths:
            return [self]
        found = []
        for path in self.paths:
            factor = path.of(self.factor, values)
            if factor is None:
                return [self]
            found.append(Term(self.value, (path.window.param,), path.window, factor))
        return found

    @property
    def goes_by_rows(self) -> bool:
        """Whether each row is pulled back by itself, and never a sum of them: the pullback may not be linear."""
        return self.window is None and not is_linear(self.value)

    def take(self, s: slice) -> Term:
        """The same for some of the examples."""
        return replace(self, factor=self.factor.take(s))


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

    def take(self, s: slice) -> Component:
        """The same for some of the examples."""
        return replace(self, terms=[t.take(s) for t in self.terms])

    def rows(self, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """name -> (b, *shape), written into `out` where that is given."""
        whole = self._of_whole()
        if whole and (len(whole) == 1 or self._may_write()):
            (name,) = self.leaves
            return {name: self._sum_of_rows(whole, None if out is None else out[name])}
        found = _sums(part for term in self.terms for part in self._term_rows(term))
        full = {
            k: found[k] if k in found else p.new_zeros(self.batch, *p.shape) for k, p in self.leaves.items()
        }
        return full if out is None else {k: out[k].copy_(r) for k, r in full.items()}

    def _of_whole(self) -> list[Factor] | None:
        """The factors, where all are of one parameter as it is; None where one is of a part, or of another value."""
        windows = self.windows() or {}
        return next(iter(windows.values())) if [w.whole for w in windows] == [True] else None

    def _may_write(self) -> bool:
        """Whether results may be made in place: neither differentiated again nor written down as a graph."""
        return not self.create_graph and not is_recorded(self.terms[0].value)

    def _sum_of_rows(self, factors: list[Factor], out: Tensor | None) -> Tensor:
        """The sum of the rows, with memory for no more than one factor's (an embedding that is the head too)."""
        first, *others = sorted(factors, key=lambda f: f.adds_in_place)
        if not others:
            return first.rows(out)
        rows = first.rows(self.terms[0].value.new_empty(self.batch, *first.shape) if out is None else out)
        for factor in others:
            factor.add_to(rows)
        return rows

    def _term_rows(self, term: Term) -> Iterator[tuple[str, Tensor]]:
        rows = term.factor.rows()
        if term.window is not None:
            yield term.window.param, term.window.rows(rows, self.leaves[term.window.param])
        else:
            yield from vjp_rows(term.value, self.leaves, term.params, rows, self.create_graph)

    def vjp(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """name -> (*shape): sum over b of weights[name][b] times row b."""
        return _sums(part for term in self.terms for part in self._term_vjp(term, weights))

    def _term_vjp(self, term: Term, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if term.window is not None:
            name = term.window.param
            total = term.factor.weighted_sum(weights[name])
            yield name, term.window.rows(total[None], self.leaves[name])[0]
            return
        if term.goes_by_rows:
            for k, rows in self._term_rows(term):
                yield k, Rows(rows).weighted_sum(weights[k])
            return
        distinct = {id(weights[k]): weights[k] for k in term.params}
        for key, w in distinct.items():
            names = tuple(k for k in term.params if id(weights[k]) == key)
            yield from vjp(term.value, self.leaves, names, term.factor.weighted_sum(w), self.create_graph)

    def dot(self, v: dict[str, Tensor]) -> Tensor:
        """(b,): the inner product of each row with `v`."""
        parts = []
        for term in self.terms:
            tangent = self._tangent(term, v)
            if tangent is None:
                parts += [Rows(rows).dot(v[k]) for k, rows in self._term_rows(term)]
            else:
                parts.append(term.factor.balanced().dot(tangent))
        return torch.stack(parts).sum(0) if parts else self.terms[0].value.new_zeros(self.batch).real

    def _tangent(self, term: Term, v: dict[str, Tensor]) -> Tensor | None:
        """The derivative of a term's value along `v`; None where it takes rows."""
        if term.window is not None:
            return term.window.of(v[term.window.param], self.leaves[term.window.param])
        if term.goes_by_rows:
            return None
        return jvp(term.value, self.leaves, term.params, v, self.create_graph)

    # --- squares and inner products -----------------------------------------------------------------

    def windows(self) -> dict[Window, list[Factor]] | None:
        """The factors by window, where inner products can be taken between factors; None where rows are needed."""
        found: dict[Window, list[Factor]] = {}
        for term in self.terms:
            if term.window is None or not term.window.isometric:
                return None
            window, factor = _upright(term, self.leaves[term.window.param])
            found.setdefault(window, []).append(factor)
        if any(not a.disjoint(b) for a, b in combinations(found, 2)):
            return None
        return found

    def sq_norms(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """name -> (b,): squared norms by parameter; and the doubt, if there is one, that these are rounding."""
        windows = self.windows()
        if windows is None or (_several(windows) and not self._may_ask()):
            return self.sq_norms_by_rows(), None
        (name,) = self.leaves
        factors = [f for same in windows.values() for f in same]
        if self._may_ask() and (_several(windows) or any(f.sums_products for f in factors)):
            whole, doubt = _sq_norms_by_products(windows)
            return {name: whole}, doubt
        return {name: sum_of([f.sq_norms() for f in factors])}, None

    def _may_ask(self) -> bool:
        return may_ask(self.terms[0].value)

    def _cancels(self, windows: dict[Window, list[Factor]]) -> bool:
        """Whether rows may be so small beside the factors they are sums of that inner products of these are mostly rounding."""
        if not _several(windows):  # each looks at its own positions
            return False
        return not self._may_ask() or answers([_sq_norms_by_products(windows)[1]])[0]

    def sq_norms_by_rows(self) -> dict[str, Tensor]:
        """name -> (b,): squared norms of the rows themselves."""
        windows = self.windows()
        if windows is not None and not _several(windows):
            (name,) = self.leaves
            return {name: sum_of([f.sq_norms_by_rows() for (f,) in windows.values()])}
        parts: dict[str, list[Tensor]] = {k: [] for k in self.leaves}
        for piece in self.pieces():
            for k, r in piece.rows().items():
                parts[k].append(squared_norms(r))
        return {k: torch.cat(p) for k, p in parts.items()}

    def pieces(self, limit: int | None = None) -> Iterator[Component]:
        """The same, some examples at a time, whose rows together take about `limit` bytes."""
        row_bytes = sum(p.numel() * p.element_size() for p in self.leaves.values())
        for s in slices(self.batch, row_bytes, limit):
            yield self.take(s)

    def sum_squares(self) -> dict[str, Tensor]:
        """name -> (*shape): the sum over b of the squared rows, elementwise."""
        if len(self.terms) == 1 and self.terms[0].window is not None and self.terms[0].window.isometric:
            window, squares = self.terms[0].window, self.terms[0].factor.sum_squares()
            return {window.param: window.rows(squares[None], self.leaves[window.param])[0]}
        rows = (part for piece in self.pieces() for part in piece.rows().items())
        return _sums((k, square(accumulable(r)).sum(0)) for k, r in rows)

    def gram(self, other: Component) -> Tensor:
        """(b, c): the inner products of rows with the rows of another call's component of the same parameters."""
        mine, theirs = self.windows(), other.windows()
        if mine is None or theirs is None or not self._matches(other, mine, theirs):
            return self._gram_by_rows(other)
        if self._cancels(mine) or (other is not self and other._cancels(theirs)):
            return self._gram_by_rows(other)
        mine = {w: [f.for_products() for f in own] for w, own in mine.items()}
        theirs = mine if other is self else {w: [f.for_products() for f in own] for w, own in theirs.items()}
        parts = [f.gram(g) for w in mine for f in mine[w] for g in theirs.get(w, [])]
        none = accumulable(self.terms[0].value.new_zeros(self.batch, other.batch)).real
        return sum_of(parts).to(none.dtype) if parts else none

    def _matches(
        self, other: Component, mine: dict[Window, list[Factor]], theirs: dict[Window, list[Factor]]
    ) -> bool:
        # a window is a place in memory, which says nothing of a parameter that is laid out in another way
        same_memory = all(p.stride() == other.leaves[k].stride() for k, p in self.leaves.items())
        return same_memory and all(a == b or a.disjoint(b) for a in mine for b in theirs)

    def _gram_by_rows(self, other: Component) -> Tensor:
        shared = [k for k in self.leaves if k in other.leaves]
        lines = []
        for piece in self.pieces(BLOCK_BYTES):
            rows, line = piece.rows(), []
            for theirs in other.pieces(BLOCK_BYTES):
                others = theirs.rows()
                line.append(torch.stack([Rows(rows[k]).gram(Rows(others[k])) for k in shared]).sum(0))
            lines.append(torch.cat(line, 1))
        return torch.cat(lines)


def _sums(parts: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """name -> the sum of the parts of that name, added up one at a time."""
    found: dict[str, Tensor] = {}
    for k, part in parts:
        found[k] = found[k] + part if k in found else part
    return found


def _upright(term: Term, p: Tensor) -> tuple[Window, Factor]:
    """A term's window and factor, turned round where the window is the parameter's transpose.

    So the uses of one matrix as w and as w.T (a head tied to an embedding, an autoencoder) meet in one window.
    """
    window, factor = term.window, term.factor
    assert window is not None
    turned = window.size == tuple(p.shape[::-1]) and window.stride == tuple(p.stride()[::-1])
    if window.whole or p.dim() != 2 or not turned or not isinstance(factor, Outer) or factor.g.shape[2] != 1:
        return window, factor
    if (factor.g.shape[3], factor.x.shape[3]) != window.size:  # not its rows and columns
        return window, factor
    swapped = replace(factor, g=factor.x, x=factor.g, shape=tuple(p.shape))
    return Window.identity(window.param, p), swapped


def _several(windows: dict[Window, list[Factor]]) -> bool:
    """Whether a window has several factors, between which there are inner products."""
    return any(len(same) > 1 for same in windows.values())


def _sq_norms_by_products(windows: dict[Window, list[Factor]]) -> tuple[Tensor, Tensor]:
    """(b,): squared norms by inner products of factors and of positions; and the doubt () that these are rounding."""
    sq, parts = [], []
    for same in windows.values():
        if len(same) == 1 and not same[0].sums_products:
            own = [same[0].sq_norms()]
            sq += own
            parts += own
            continue
        same = [f.for_products() for f in same]
        own = [f.inner(f) if f.sums_products else f.sq_norms() for f in same]
        sq += own + [2 * f.inner(g) for f, g in combinations(same, 2)]
        parts += [f.squares_of_parts(n) for f, n in zip(same, own, strict=True)]
    whole = sum_of(sq)
    return whole, cancels(whole, sum_of(parts))


def sq_norms(components: Iterable[Component]) -> dict[str, Tensor]:
    """name -> (b,): squared norms by parameter; the doubts of all components are answered at once."""
    found = [(c, *c.sq_norms()) for c in components]
    doubtful = iter(answers([doubt for _, _, doubt in found if doubt is not None]))
    norms: dict[str, Tensor] = {}
    for c, sq, doubt in found:
        norms |= c.sq_norms_by_rows() if doubt is not None and next(doubtful) else sq
    return norms


def components(leaves: dict[str, Tensor], terms: list[Term], create_graph: bool) -> list[Component]:
    """Group terms that reach a common parameter; parameters that no term reaches are in none."""
    owner: dict[str, int] = {}  # parameter -> its group
    groups: dict[int, list[Term]] = {}
    for i, term in enumerate(terms):
        touching = list(dict.fromkeys(owner[k] for k in term.params if k in owner))
        groups[i] = [t for j in touching for t in groups.pop(j)] + [term]
        owner |= {k: i for k, j in owner.items() if j in touching} if touching else {}
        owner |= dict.fromkeys(term.params, i)
    names: dict[int, dict[str, Tensor]] = {i: {} for i in groups}
    for k, p in leaves.items():
        if k in owner:
            names[owner[k]][k] = p
    return [Component(names[i], own, create_graph) for i, own in groups.items()]
