"""The per-example Jacobian as an unevaluated linear operator: J[b] = dL_b / d(parameters)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..base import nested
from ..base.checks import described, shaped
from ..base.memory import refuse_shared, room_for_rows, storage_of
from ..base.modes import recording, without_autocast
from ..base.numerics import accumulable, is_half, is_inexact, square, sum_of
from ..errors import InputError
from ..factors import Rows, WideRows
from ..factors.joined import join
from ..inputs.call import Call
from .component import Component, Term, components, sq_norms
from .pullback import Window

# rows that may be kept between a norm and a weighted sum, in all. More is slower: fresh memory costs more than computing
# small rows again (ResNet-18 and AlexNet on a CPU, clipped sums at 0, 8, 32 and 256 MiB: 32 was the fastest on both).
KEEP_BYTES = 1 << 25


@dataclass(frozen=True)
class Moments:
    """The first two moments of the rows over the batch, by parameter.

    Attributes:
        mean: name -> (*shape), sum_b g_b / B.
        second: name -> (*shape), sum_b |g_b|^2 / B, elementwise; half precision gives float32.
    """

    mean: dict[str, Any]
    second: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Jacobian:
    """J, of shape batch x parameters: `losses` (B,), and the rows dL_b/d(parameters) unevaluated.

    It still reads inputs, and some parameters: where one is changed in place, its methods raise an `InputError` from then on.

    >>> J = per_example_jacobian(model)(params, x, y)
    >>> J.norms().shape, J.gram().shape
    (torch.Size([5]), torch.Size([5, 5]))
    """

    losses: Tensor
    leaves: dict[str, Tensor]  # the parameters, in the order of the result
    terms: list[Term]
    create_graph: bool = False
    paths: nested.Structure | None = None  # of nested parameters, whose names are these joined by dots
    # tensors of the caller's that the factors still read, and their versions
    read: tuple[tuple[Tensor, int], ...] = ()

    @classmethod
    def of_rows(cls, losses: Tensor, rows: dict[str, Tensor], create_graph: bool = False) -> Jacobian:
        """An operator around rows that exist already."""
        leaves = {k: r.new_empty(r.shape[1:]) for k, r in rows.items()}
        terms = [Term(leaves[k], (k,), Window.identity(k, leaves[k]), Rows(r)) for k, r in rows.items()]
        return cls(losses, leaves, terms, create_graph)

    def __repr__(self) -> str:
        return f"Jacobian({self.batch} examples, {len(self.leaves)} parameters)"

    def __reduce__(self) -> Any:
        raise InputError(
            "a Jacobian holds the graph of its call, and can neither be copied nor pickled; keep its rows, norms or sums"
        )

    @property
    def batch(self) -> int:
        """The number of examples B."""
        return self.losses.shape[0]

    @property
    def T(self) -> Transposed:
        """The transpose: `J.T @ w` is `J.vjp(w)`."""
        return Transposed(self)

    def __matmul__(self, v: Mapping[str, Tensor]) -> Tensor:
        return self.jvp(v)

    @cached_property
    def components(self) -> list[Component]:
        """The terms in groups, each of parameters that are used together."""
        return components(self.leaves, self.terms, self.create_graph)

    def watching(self, call: Call, constants: list[Tensor]) -> Jacobian:
        """The same, with an eye on what it still reads of a call's tensors, and of constants of the model's code."""
        memory, others = self._memory(), [*call.buffers, *constants]
        given = [*call.flat(), *others]
        read = [t for t in given if storage_of(t) in memory]
        derived = [t for t in self.terms if t.window is None]
        if derived:  # by code on parameters, buffers and constants, of which autograd keeps what it needs
            names = {k for t in derived for k in t.params}
            read += [p for k, p in call.params.items() if k in names or k not in self.leaves] + others
        if self.create_graph:
            read += filter(is_inexact, given)
        # an operation that is replayed reads what it was given
        if any(t.factor.is_replayed for t in self.terms):
            read += given
        distinct = {id(t): t for t in read if not t.is_inference()}
        return replace(self, read=tuple((t, t._version) for t in distinct.values()))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The modes that its arithmetic runs in; an error where what it reads has changed."""
        if any(t._version != version for t, version in self.read):
            raise InputError(
                "a tensor that the Jacobian may still read (an input, a parameter, a buffer) has been changed in place since: "
                "finish with the Jacobian first, or pass a copy"
            )
        with recording(self.create_graph), without_autocast(self.losses.device.type):
            yield

    def rows(self, out: Mapping[str, Tensor] | None = None, *, last: bool = False) -> dict[str, Tensor]:
        """name -> (B, *shape): the per-example gradients, written into the first B rows of `out` where that is given.

        They are copies of what the operator holds, unless `last` says that it is not used again.

        Raises:
            InputError: where `out` lacks a parameter, or has rows of another shape or dtype for it; nothing is written then.
        """
        if out is not None:
            out = nested.flatten(out) if nested.is_nested(out) else out
            out = room_for_rows(out, self.leaves, self.batch)
            if not last:  # else it has been checked before there was an operator
                refuse_shared(out, [("what the Jacobian reads", t) for t in self._held()])
        with self.working():
            if out is not None:
                into = out
                written = self._by_name(
                    lambda c: c.rows({k: into[k] for k in c.leaves}), lambda k, _: into[k].zero_()
                )
                return self._named(written)
            found = self._by_name(Component.rows, self._rows_of_zeros)
            return self._named(apart(found, set() if last else self._memory()))

    def rows_in_turn(self) -> Iterator[tuple[str, Tensor]]:
        """Each name and its rows (B, *shape), of a few parameters at a time, in any order; to be read only."""

        def rows(c: Component) -> dict[str, Tensor]:
            with self.working():
                return c.rows()

        return self._in_turn(rows, self._rows_of_zeros)

    def _rows_of_zeros(self, _: str, p: Tensor) -> Tensor:
        return p.new_zeros(self.batch, *p.shape)

    def _by_name(
        self, of: Callable[[Component], dict[str, Tensor]], zeros: Callable[[str, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """What the components have of each parameter, in the parameters' order; zeros for those that are not used."""
        found = dict(self._in_turn(of, zeros))
        return {k: found[k] for k in self.leaves}

    def _in_turn(
        self, of: Callable[[Component], dict[str, Tensor]], zeros: Callable[[str, Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """The same, one component after the other."""
        unused = dict(self.leaves)
        for c in self.components:
            for k, found in of(c).items():
                del unused[k]
                yield k, found
        yield from ((k, zeros(k, p)) for k, p in unused.items())

    def _named(self, results: dict[str, Tensor]) -> dict[str, Any]:
        """Nested as the parameters were."""
        return results if self.paths is None else nested.nest(results, self.paths)

    def _memory(self) -> set[int | None]:
        """Of the factors' tensors."""
        return {storage_of(t) for t in self._held()} - {None}

    def _held(self) -> list[Tensor]:
        return [v for t in self.terms for v in t.factor.held()]

    def norms(self, per_param: bool = False) -> Tensor | dict[str, Tensor]:
        """(B,): |J[b]| over all parameters together; with `per_param`, name -> (B,). Half precision gives float32."""
        with self.working():
            sq = sq_norms(self.components)
            if not per_param:
                found = list(sq.values())
                return _sqrt(sum_of(found), self.create_graph) if found else self._zeros(self.batch)
            unused = {k: p for k, p in self.leaves.items() if k not in sq}
            sq |= {k: square(accumulable(p.new_zeros(self.batch))) for k, p in unused.items()}
            return self._named(apart({k: _sqrt(sq[k], self.create_graph) for k in self.leaves}))

    def _zeros(self, *shape: int) -> Tensor:
        """Of what is computed of examples where no parameter is used."""
        return accumulable(self.losses.new_zeros(shape))

    def vjp(self, weights: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """name -> (*shape): sum over b of weights[b] times row b; weights (B,), or one for each parameter by name.

        Raises:
            InputError: where weights are missing, or are not one number for each example.
        """
        by_name = (
            nested.flatten(weights) if isinstance(weights, Mapping) else dict.fromkeys(self.leaves, weights)
        )
        for k in self.leaves:
            shaped(by_name.get(k), (self.batch,), f"the weights for '{k}'", "one for each example")
        with self.working():
            total = self._by_name(lambda c: c.vjp(by_name), lambda _, p: torch.zeros_like(p))
            return self._named(apart(total))

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        """(B,): <J[b], v> for a direction `v`.

        Raises:
            InputError: where `v` has not the parameters' names and shapes.
        """
        if not isinstance(v, Mapping):
            raise InputError(
                f"the direction is {described(v)}; expected name -> (*shape), like the parameters"
            )
        v = nested.flatten(v)
        for k, p in self.leaves.items():
            shaped(v.get(k), p.shape, f"the direction for '{k}'")
        with self.working():
            v = {k: v[k].to(p.dtype) for k, p in self.leaves.items()}
            parts = [c.dot(v) for c in self.components]
            return sum_of(parts) if parts else self._zeros(self.batch)

    def gram(self, other: Jacobian | None = None) -> Tensor:
        """(B, B'): <J[b], J'[c]>, with another call's rows, or with its own.

        Raises:
            InputError: where the other call's parameters have other names or shapes.
        """
        other = self if other is None else other
        if not isinstance(other, Jacobian):
            raise InputError(f"the other operand is {described(other)}; expected a Jacobian")
        for k in dict.fromkeys([*self.leaves, *other.leaves]):
            a, b = self.leaves.get(k), other.leaves.get(k)
            if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
                raise InputError(
                    f"the two Jacobians are for different parameters, so their rows have no inner products: '{k}' is "
                    f"{_kind(a)} here and {_kind(b)} there"
                )
        with self.working(), other.working():
            parts = [
                c.gram(d)
                for c in self.components
                for d in other.components
                if not c.leaves.keys().isdisjoint(d.leaves)
            ]
            return sum_of(parts) if parts else self._zeros(self.batch, other.batch)

    def moments(self) -> Moments:
        """The mean of the rows and of their squares, elementwise, by parameter."""
        weights = self.losses.new_full((self.batch,), 1 / max(1, self.batch))
        with self.working():
            squares = self._by_name(
                Component.sum_squares, lambda _, p: square(accumulable(torch.zeros_like(p)))
            )
            second = {k: s / max(1, self.batch) for k, s in squares.items()}
        return Moments(self.vjp(weights), self._named(second))

    def keep(self) -> Jacobian:
        """The same operator with rows built where a norm and a weighted sum together are cheaper from them."""
        if isinstance(self.batch, torch.SymInt):  # what that is depends on the batch size
            return self
        kept, left = [], KEEP_BYTES
        with self.working():
            for term in sorted(self.terms, key=_kept_bytes):
                if term.factor.keeps_rows() and _kept_bytes(term) <= left:
                    left -= _kept_bytes(term)
                    rows, dtype = term.factor.widened().rows(), term.factor.dtype
                    term = replace(term, factor=Rows(rows) if rows.dtype == dtype else WideRows(rows, dtype))
                kept.append(term)
        return replace(self, terms=kept)


@dataclass(frozen=True, eq=False)
class Transposed:
    """J transposed."""

    jacobian: Jacobian

    def __repr__(self) -> str:
        return f"{self.jacobian!r}.T"

    def __matmul__(self, weights: Tensor) -> dict[str, Tensor]:
        return self.jacobian.vjp(weights)


def apart(results: dict[str, Tensor], taken: Iterable[int | None] = ()) -> dict[str, Tensor]:
    """Each in memory of its own and none that is taken: to change one in place changes no other, and no element of it twice.

    Two biases added one after the other have one cotangent, which is the rows of both; that of a sum is one number, expanded.
    """
    seen = set(taken)
    for k, t in results.items():
        memory = storage_of(t)
        if memory in seen or any(isinstance(s, int) and s == 0 for s in t.stride()):
            results[k] = t.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
    return results


def _kind(p: Tensor | None) -> str:
    return described(p) + ("" if p is None else f" of {p.dtype}")


def _kept_bytes(term: Term) -> int:
    """Of rows that are kept, those of half precision in float32."""
    of_number = torch.float32.itemsize if is_half(term.factor.dtype) else term.factor.dtype.itemsize
    return term.factor.batch * term.factor.row_numel * of_number


def _sqrt(sq: Tensor, differentiable: bool) -> Tensor:
    sq = sq.clamp(min=0)  # rounding can leave a square that is a sum of products a little below zero
    if not differentiable:
        return sq.sqrt()
    zero = sq == 0  # the norm has gradient zero, not infinity, where it is zero itself
    return torch.where(zero, 0, torch.where(zero, 1, sq).sqrt())


def joined(terms: list[Term]) -> list[Term]:
    """One term for each value, or part of a parameter, and kind of factor: uses over time become one factor along time.

    The list is emptied: a recurrent layer's cotangents of every step go as soon as they are joined.
    """
    grouped: dict[Window | int, list[Term]] = {}
    for term in terms:
        grouped.setdefault(term.window or id(term.value), []).append(term)
    terms.clear()
    found = []
    for key in list(grouped):
        same = grouped.pop(key)
        if len(same) > 1:
            same = [replace(same[0], factor=f) for f in join([t.factor for t in same])]
        found += same
    return found
