"""Where the values of a graph have their examples, as far as its operations tell, whatever the numbers are.

The inputs are (b, ...), example by example. An operation that is known to keep examples apart (`track_rules.py`) hands their
places on. A shuffle of the batch, an index along it other than each example's own place, that place or the size of the batch as
a number, and any operation that is not known do not, even where the first numbers do not show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx

from ..base import trees
from ..base.nodes import (
    batch_dims,
    draws,
    fold_factor_of,
    is_model_of,
    is_of_batch,
    mutated_operands,
    sizes_in,
    value,
)
from .layout import Layout
from .track_rules import Rule, Step, is_alike_for_all, is_index, is_range, rule_of, rule_of_same

Places = dict[fx.Node, Layout]


def tracked(graph: fx.Graph, given: Iterable[fx.Node], batch: Any, *, drawing: bool = False) -> Places:
    """The places of the examples in the values that are tracked from those given, which are (b, ...).

    With `drawing`, random numbers count as the examples' own. Nothing is tracked where examples are written into memory in
    a way that is not known.
    """
    walk = Walk(given, batch, drawing)
    for node in graph.nodes:
        if node.op == "call_function" and not walk.goes_past(node):
            return {}
    return walk.places


class Walk:
    """What is known of the examples' places up to some node of a graph."""

    def __init__(self, given: Iterable[fx.Node], batch: Any, drawing: bool):
        self.places: Places = dict.fromkeys(given, Layout())
        self.batch, self._drawing = batch, drawing
        self._lost = set[fx.Node]()  # made of examples, or of their number, and not tracked
        self._own: Places = {}  # among these: each example's place in the batch, `torch.arange(b)`

    def goes_past(self, node: fx.Node) -> bool:
        """Take note of a node's value; whether what it writes into memory is tracked."""
        read = [n for n in node.all_input_nodes if self._has_examples(n) and not is_model_of(n, node)]
        place = self._place(node, read)
        if place is not None:
            self.places[node] = place
        elif read or (isinstance(value(node), Tensor) and sizes_in(node, self.batch)):
            self._lost.add(node)
            if (own := self._own_place(node, read)) is not None:
                self._own[node] = own
        written = [*mutated_operands(node)] if read else []
        return not written or (place is not None and all(n in self.places for n in written))

    def _has_examples(self, node: fx.Node) -> bool:
        """Whether a value depends on the examples, or on their number."""
        return node in self._lost or is_of_batch(value(node), self.batch)

    def _place(self, node: fx.Node, read: list[fx.Node]) -> Layout | None:
        if draws(node.target) and not self._drawing:
            return None
        if not read:
            return self._handed_on(node, {}, lambda _: 1 if is_alike_for_all(node, self.batch) else None)
        known = self.places | self._own if is_index(node) else self.places
        if any(n not in known for n in read):
            return None
        places, rule = {n: known[n] for n in read}, rule_of(node, self.batch)
        place = None if rule is None else self._handed_on(node, places, rule)
        return self.untold(node, places) if place is None else place

    def untold(self, node: fx.Node, read: Places) -> Layout | None:
        """The place in the value of a node of which no rule tells, read from values that are tracked."""
        return None

    def _own_place(self, node: fx.Node, read: list[fx.Node]) -> Layout | None:
        if is_range(node, self.batch):
            return Layout()
        if read and all(n in self._own for n in read) and (rule := rule_of_same(node)) is not None:
            return self._handed_on(node, {n: self._own[n] for n in read}, rule)
        return None

    def _handed_on(self, node: fx.Node, read: Places, rule: Rule) -> Layout | None:
        """The place of the examples in a node's value, or in several that are alike in it."""
        tensors = trees.tensors(value(node))
        shapes = {(batch_dims(t, self.batch), fold_factor_of(t, self.batch)) for t in tensors}
        if len(shapes) != 1:
            return None
        ((dims, fold),) = shapes
        if fold is None:
            return None
        step = Step(node, read, self._own.keys() & read.keys(), tensors[0], dims[0], fold, self.batch)
        lead = rule(step)
        return None if lead is None or fold % lead else Layout(dims[0], lead, fold // lead)
