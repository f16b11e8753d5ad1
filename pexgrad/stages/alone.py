"""Operations of which a graph does not tell whether examples stay apart, each tried by itself.

In a model the numbers of the first examples may hide that an operation mixes them: a mask that is closed, a limit that none of
them reaches. By itself it is run on random numbers, then on others in the places of all examples but one, as large or a thousand
times larger; the results of that one may not change, nor its gradients. This takes operands whose examples are tracked
(`tracked.py`); what picks by an index is not tried.

A kernel of somebody's own may take numbers for places in memory without a look at them. So it is given no ids, and numbers
between 0 and 1 only; its cotangents may be large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ..base import trees
from ..base.nodes import batch_dims, by_name, draws, is_model_of, operation, value
from ..base.numerics import is_inexact
from ..base.symbols import number
from ..tracing.opaque import HOOKED
from .few_examples import normal_like
from .layout import Layout, candidates
from .mixing_by_shape import Mixing
from .track_rules import is_index
from .tracked import Places, Walk
from .trial import moves

_BATCH = 3
_LARGER = 1e3


def mixing_alone(graph: fx.Graph, given: Iterable[fx.Node], batch: Any) -> Mixing | None:
    """The first operation, of those that can be tried, in which examples mix; the inputs given are (b, ...)."""
    walk = _Trying(given, batch)
    for node in graph.nodes:
        if node.op == "call_function" and (not walk.goes_past(node) or walk.mixing):
            break
    return walk.mixing


class _Trying(Walk):
    """Goes on behind an operation that is not known where a trial of it tells the examples' places."""

    def __init__(self, given: Iterable[fx.Node], batch: Any):
        super().__init__(given, batch, drawing=True)
        self._data = {*self.places}  # what is made of examples, and not of their number alone
        self.mixing: Mixing | None = None

    def goes_past(self, node: fx.Node) -> bool:
        if any(n in self._data and not is_model_of(n, node) for n in node.all_input_nodes):
            self._data.add(node)
        return super().goes_past(node)

    def untold(self, node: fx.Node, read: Places) -> Layout | None:
        changing = {n: at for n, at in read.items() if n in self._data}
        if (
            not changing
            or is_index(node)
            or _takes_the_first(node)
            or draws(node.target)
            or HOOKED in node.meta
        ):
            return None
        try:
            options = _Operation(node, changing, self.batch).places()
        except Exception:  # noqa: BLE001 - it may take no such numbers
            return None
        if options and not all(options):
            self.mixing = Mixing(node, of_size=False)
        places = {at for each in options for at in each}
        return places.pop() if len(places) == 1 else None


def _takes_the_first(node: fx.Node) -> bool:
    """Whether it takes so many from the beginning: of copies of a token for each position, say, the first B."""
    if not isinstance(node.target, OpOverload) or operation(node) != "slice":
        return False
    named = by_name(node.target, node.args, node.kwargs)
    return named.get("start") in (0, None) and named.get("step", 1) == 1


class _Operation:
    """A node by itself, and numbers for what it reads."""

    def __init__(self, node: fx.Node, read: Places, batch: Any):
        self._node, self._read, self._batch = node, read, batch
        self._is_torchs = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        self._generator = torch.Generator().manual_seed(0)
        self._numbers = {n: self._made_up(n) for n in node.all_input_nodes}
        self._has_batch = [bool(batch_dims(v, batch)) for v in trees.tensors(value(node))]

    def places(self) -> list[list[Layout]]:
        """For each result with the batch, where its examples may be: where none changes with the others."""
        results = itertools.compress(trees.tensors(value(self._node)), self._has_batch)
        options = [[*candidates(v, self._batch)] for v in results]
        if not options or not all(options):
            return options
        before = self._run(self._numbers)
        for b, larger in itertools.product(range(_BATCH), (False, True)):
            after = self._run(self._other_numbers(b, larger))
            options = [
                [at for at in each if not moves(at, x, y, _BATCH, b)]
                for each, x, y in zip(options, before, after, strict=True)
            ]
        if any(len(each) != 1 for each in options):
            return options
        return options if self._gradients_stay([at for (at,) in options], before) else [[]]

    def _gradients_stay(self, at: Sequence[Layout], results: list[Tensor]) -> bool:
        """Whether no example's gradient changes with the others' numbers and cotangents."""
        places = dict(enumerate(at))
        arriving = {i: normal_like(t, self._generator) for i, t in enumerate(results)}
        before = self._gradients(self._numbers, arriving)
        for b, larger in itertools.product(range(_BATCH), (False, True)):
            new = {
                i: normal_like(t, self._generator) * (_LARGER if larger else 1) for i, t in arriving.items()
            }
            after = self._gradients(self._other_numbers(b, larger), self._but_for(b, arriving, new, places))
            if any(moves(self._read[n], g, after[n], _BATCH, b) for n, g in before.items()):
                return False
        return True

    def _run(self, numbers: dict[fx.Node, Any]) -> list[Tensor]:
        # copies: it may write to them
        given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in numbers.items()}
        args, kwargs = map_arg((self._node.args, self._node.kwargs), given.__getitem__)
        results = trees.tensors(self._node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]
        return [*itertools.compress(results, self._has_batch)]

    def _gradients(self, numbers: dict[fx.Node, Any], arriving: dict[int, Tensor]) -> dict[fx.Node, Tensor]:
        leaves = {n: numbers[n].clone().requires_grad_() for n in self._read if is_inexact(numbers[n])}
        with torch.enable_grad():
            results = self._run(numbers | leaves)
        followed = [(t, arriving[i]) for i, t in enumerate(results) if t.requires_grad]
        if not followed or not leaves:
            return {}
        tensors, cotangents = zip(*followed, strict=True)
        found = torch.autograd.grad(tensors, [*leaves.values()], cotangents, allow_unused=True)
        return {n: g for n, g in zip(leaves, found, strict=True) if g is not None}

    def _other_numbers(self, b: int, larger: bool) -> dict[fx.Node, Any]:
        """Others for all examples but b."""
        by = _LARGER if larger and self._is_torchs else 1
        new = {n: self._random(self._numbers[n]) for n in self._read}
        new = {n: v * by if is_inexact(v) else v for n, v in new.items()}
        return self._but_for(b, self._numbers, new, self._read)

    def _but_for(
        self, b: int, own: dict[Any, Any], new: dict[Any, Tensor], places: Mapping[Any, Layout]
    ) -> dict[Any, Any]:
        """`own` with the new values, in which example b stays."""
        for n, v in new.items():
            places[n].view(v, _BATCH)[b] = places[n].view(own[n], _BATCH)[b]
        return own | new

    def _made_up(self, n: fx.Node) -> Any:
        val = value(n)
        if n.op == "get_attr":
            return getattr(n.graph.owning_module, str(n.target))
        if not isinstance(val, Tensor):
            return number(val, self._batch, _BATCH)
        shape, strides = (
            [number(s, self._batch, _BATCH) for s in sizes] for sizes in (val.shape, val.stride())
        )
        # as it lies in memory, which `as_strided` asks for
        empty = torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device)
        # what no example has may be a variance
        made_up = self._random(empty if 0 not in strides else empty.contiguous())
        return made_up.abs() + 0.5 if is_inexact(made_up) and n not in self._read else made_up

    def _random(self, like: Tensor) -> Tensor:
        if is_inexact(like):
            numbers = normal_like(like, self._generator)
            numbers = numbers if self._is_torchs or like.is_complex() else numbers.abs() % 1
            return torch.empty_like(like).copy_(numbers)
        if like.dtype is not torch.bool and (not self._is_torchs or like.device.type != "cpu"):
            raise TypeError("ids, which are looked up unseen")
        return (normal_like(like.float(), self._generator) > 0).to(like.dtype)  # any table has two lines
