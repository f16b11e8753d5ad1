"""Stage 5: the graph as a program that also returns what the rules need.

An activation is tapped by its *gradient edge*, the place in autograd's graph where its cotangent arrives. Unlike the
tensor itself an edge stays right when a later operation changes the activation in place, and keeps no memory alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx.graph import CodeGen

from ..base.modes import without_autocast
from ..base.nodes import Writes, put_behind, returned, value, where
from ..errors import ANY_MODEL, TraceError
from ..tracing.trace import Trace
from .parts import Part, find_parts
from .plan import Use, nodes_needed
from .rewrite import insert
from .sites import Site
from .strides import settle_strides

aten = torch.ops.aten


class Forward(NamedTuple):
    """What one run of the program returns."""

    outputs: list[Tensor]
    edges: list[GradientEdge | None]  # of each site's activations in turn; None where no gradient reaches one
    values: dict[fx.Node, Any]  # residuals, operands, and other parameter-only values
    parts: dict[int, Part]  # edges that are not needed, since their cotangents are parts of others'

    def cotangents(self, found: Iterable[Tensor | None]) -> list[Tensor | None]:
        """One for each edge, from those found at the edges themselves."""
        complete = list(found)
        for i, part in self.parts.items():
            complete[i] = part.of(complete[part.whole])
        return complete


@dataclass(frozen=True, eq=False)
class Program:
    """The tapped graph and what it returns."""

    module: fx.GraphModule
    values: list[fx.Node]
    kept: list[dict[fx.Node, fx.Node]]  # of each site: what it reads -> the same or a copy, among the values
    further: list[fx.Node]  # parameter-only values that are nobody's operands
    parts: dict[int, Part]
    below: bool  # whether it was recorded below autograd, where autocast has been and gone

    @contextlib.contextmanager
    def running(self, values: Sequence[Tensor]) -> Iterator[None]:
        """What it runs in."""
        off = without_autocast(values[0].device.type) if self.below else contextlib.nullcontext()
        with torch.enable_grad(), off:
            yield

    @property
    def outputs(self) -> list[fx.Node]:
        """The nodes of the model's output."""
        return list(returned(self.module.graph)[0])

    def run(self, values: Sequence[Tensor]) -> Forward:
        """Run forward on parameters, buffers and inputs."""
        with self.running(values):
            outputs, edges, found = self.module.forward(*values)
        return Forward(outputs, edges, dict(zip(self.values, found, strict=True)), self.parts)


def gradient_edge(activation: Tensor) -> GradientEdge | None:
    """The edge at which the activation's cotangent arrives; None where there is none."""
    return get_gradient_edge(activation) if activation.requires_grad else None


def tap(trace: Trace, sites: list[Site], uses: list[list[Use]], further: list[fx.Node]) -> Program:
    """Make the graph return edges, residuals, operands, and further parameter-only values; changes `trace.graph`."""
    graph = trace.graph
    writes = Writes(graph)
    edges: list[fx.Node | None] = []
    activations = [(site, out) for site in sites for out in site.outputs]
    written = {out for site, out in activations if writes.behind(out, site.node)}
    places = {
        out: i for i, (site, out) in enumerate(activations) if out not in written and not site.is_copies
    }
    parts = find_parts(graph, places)
    values, every_kept = dict.fromkeys(further), []
    moved: dict[fx.Node, fx.Node] = {}
    for site, site_uses in zip(sites, uses, strict=True):
        for out in site.outputs:
            moved[out] = _tapped(out, written=out in written, shared=len(site.outputs) > 1)
            with graph.inserting_after(moved[out]):
                needed = len(edges) not in parts
                edges.append(graph.call_function(gradient_edge, (moved[out],)) if needed else None)
        kept = {n: _shield(trace, moved.get(n, n), site, writes) for n in nodes_needed(site_uses, site)}
        used = [use.operand.node for use in site_uses]
        for n in used:
            _refuse_overwritten(n, site, writes)
        values |= dict.fromkeys((*kept.values(), *used))
        every_kept.append(kept)
    settle_strides(graph)
    output = graph.output_node()
    output.args = ((output.args[0], edges, list(values)),)
    graph.set_codegen(CodeGen())
    graph.lint()
    module = fx.GraphModule(trace.root, graph)
    return Program(module, list(values), every_kept, further, parts, trace.below)


def own_memory(activation: Tensor) -> Tensor:
    """`activation`, or a copy where it is a view: writing into a view takes autograd past the view's edge."""
    return activation.clone() if activation._is_view() else activation


def _tapped(out: fx.Node, *, written: bool, shared: bool) -> fx.Node:
    """The node at which `out` is tapped, and which everything else now uses in its place."""
    if not written and not shared:
        return out
    # outputs of one operation may be computed from one another: an alias separates what arrives from outside
    target = own_memory if not shared else aten.clone.default if written else aten.alias.default
    return put_behind(out, target)


def _shield(trace: Trace, n: fx.Node, site: Site, writes: Writes) -> fx.Node:
    """`n`, or a copy taken before the site runs where a later operation writes to its memory."""
    if not writes.by_or_behind(n, site.node) or not isinstance(value(n), Tensor):
        return n
    with trace.graph.inserting_before(site.node):
        return insert(trace, aten.clone.default, (n,), like=n)


def _refuse_overwritten(n: fx.Node, site: Site, writes: Writes) -> None:
    if writes.behind(n, site.node):
        raise TraceError(
            f"{where(n)} is used by {where(site.node)} and overwritten afterwards; "
            f"use a new tensor for the new value, or {ANY_MODEL}"
        )
