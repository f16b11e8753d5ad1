"""One input signature, traced: all stages put together, and the function that they make."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from .base.modes import without_autocast
from .base.nodes import batch_dims, fold_factor_of, value
from .base.still import StandStill
from .errors import LossError, PexgradError
from .inputs.arguments import Options
from .inputs.call import Call
from .inputs.loss import ExampleLosses, Slices, Way
from .inputs.rebind import Bound
from .inputs.reductions import NotPerExample
from .inputs.snapshot import Held, Place, Snapshot, snapshot
from .operator.component import Term
from .operator.jacobian import Jacobian, joined
from .operator.pullback import Window, find_window
from .stages.evaluate import BoundSite, cotangents, factors, way_out
from .stages.layout import Layout
from .stages.loss_graph import mixing_in
from .stages.mixing import Mixing
from .stages.plan import Use, nodes_needed, plan_site
from .stages.probe import Layouts, first_layouts, probe, refuse_mixing_in
from .stages.rewrite import Output, rewrite
from .stages.sample import alike, draw, shrunk, still_alike, varied
from .stages.sites import Operand, Site, find_sites
from .stages.tap import Program, Slots, tap
from .tracing.rehearsal import rehearsed
from .tracing.trace import Trace, trace


@dataclass(frozen=True, eq=False)
class SeenLoss:
    """The code of a loss whose reductions were looked at, which may change between calls."""

    code: Snapshot
    steps: list[Any]

    def is_of(self, loss: ExampleLosses) -> bool:
        """Whether the loss is still made of the same."""
        return snapshot(loss.loss).same_code(self.code)


# losses of one example that are worth computing once, when a model is traced
MANY_LOSSES = 256


@dataclass(frozen=True, eq=False)
class Outputs:
    """How the graph's outputs become the model's output, whole or for one example."""

    trace: Trace
    layouts: list[Layout | None]
    copied: list[bool]  # the batch dimension is ours: the model's own output has none

    def whole(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the batch."""
        return self.trace.output(tensors)

    def example(self, tensors: Sequence[Tensor], batch: int, b: int) -> Any:
        """The model's output for example b as a batch of one."""
        parts = [
            t if at is None else at.example(t, batch, b) for t, at in zip(tensors, self.layouts, strict=True)
        ]
        return self.trace.output([p[0] if c else p for p, c in zip(parts, self.copied, strict=True)])

    def copy(self, tensors: Sequence[Tensor]) -> Any:
        """The output for the batch in memory of its own: a loss may write into what it is given."""
        return self.whole([t.detach().clone() for t in tensors])

    def slices(self, tensors: Sequence[Tensor], batch: int) -> Slices:
        """b -> the output for example b as a batch of one."""
        return functools.partial(self.example, tensors, batch)

    def plain(self) -> bool:
        """Whether every output has the batch on dimension 0, as torch's own losses expect."""
        return all(at == Layout() for at in self.layouts) and not any(self.copied)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A traced model: from parameters and inputs to the Jacobian."""

    trace: Trace
    program: Program
    sites: list[BoundSite]
    outputs: Outputs
    windows: dict[fx.Node, Window | None]
    loss: ExampleLosses
    way: Way
    seen: SeenLoss | None  # for `Way.REDUCED`
    alike: tuple[int, ...]  # of the compared tensors, those that the examples could not tell apart so far
    held: dict[Place, Held]  # tensors beside parameters and buffers that the trace is made of

    def serves(self, call: Call) -> bool:
        """Whether what was found out about the model holds for this call too."""
        return (
            self.trace.serves(call.batch)
            and call.module.holds(self.held)
            and still_alike(call, self.alike)
            and self.trace.follows(call)
        )

    def jacobian(self, at: Call, options: Options) -> Jacobian:
        """Forward, cotangents and factors for one batch, at parameters that are leaves."""
        losses, _, terms = self._evaluate(at, options)
        with torch.set_grad_enabled(options.create_graph):
            terms = joined(terms)
        leaves = {k: at.params[k] for k in at.trainable}
        # a copy: losses may be the very memory of an output, and that of a parameter
        own = losses if options.create_graph else losses.detach().clone()
        return Jacobian(own, leaves, terms, options.create_graph)

    def uses(self, at: Call, options: Options) -> list[tuple[BoundSite, Operand, Term]]:
        """Every use of every parameter, with its factor, for `explain`."""
        _, places, terms = self._evaluate(at, options)
        return [(site, operand, term) for (site, operand), term in zip(places, terms, strict=True)]

    def _evaluate(
        self, at: Call, options: Options
    ) -> tuple[Tensor, list[tuple[BoundSite, Operand]], list[Term]]:
        """The losses, and for each use of each parameter where it is and its term."""
        create_graph = options.create_graph
        forward = self.program.run(at.values())
        out, views = way_out(forward.outputs), [(t, t._version) for t in forward.outputs if t._is_view()]
        with torch.enable_grad():
            losses = self.losses(forward.outputs, at.y, at.batch)
        if any(t._version != version for t, version in views):
            raise LossError(
                "the loss writes into the model's output, which shares its memory with a value before it, so that gradients "
                "would go past the model's last operation; let the loss write into a copy, output.clone()"
            )
        grads = cotangents(forward, losses, out, self.sites, create_graph)
        places, terms = [], []
        with torch.set_grad_enabled(create_graph), without_autocast(losses.device.type):
            for site in self.sites:
                for operand, v, factor in factors(
                    site, forward, grads, at.batch, options.conv_rule, create_graph
                ):
                    places.append((site, operand))
                    terms.append(Term(v, operand.params, self.windows[operand.node], factor))
        return losses, places, terms

    def vectorises(self, call: Call) -> bool:
        """Whether a call's losses are computed from one tensor, for the whole batch at once."""
        output = self.outputs.whole(self.program.run(call.values()).outputs)
        by_reduction = _by_reduction(self.loss, self.outputs, output, call.y) is not None
        return by_reduction or (self.way is Way.BATCH and type(output) is Tensor)

    def mixing_of_losses(self, call: Call) -> Mixing | None:
        """What the losses look at of a whole batch.

        Raises:
            MixedExamplesError: where that cannot be seen, and they give an example another number in this batch than alone.
        """
        tensors = self.program.run(call.values()).outputs
        if self.outputs.plain():
            with contextlib.suppress(Exception):  # the loss may do what no graph can
                return mixing_in(self.loss.of_batch, self.trace.output, tensors, call.y)
        together = self.loss.of_batch(self.outputs.copy(tensors), call.y, call.batch)
        slices = self.outputs.slices(tensors, call.batch)
        self.loss.refuse_mixing(together, slices, call.y, min(call.batch, MANY_LOSSES))
        return None

    def losses(self, tensors: list[Tensor], y: Any, batch: int) -> Tensor:
        """(B,) losses from the tensors of the model's output."""
        output = self.outputs.whole(tensors)
        losses = _by_reduction(self.loss, self.outputs, output, y)
        if losses is not None:
            return losses
        if self.way is Way.BATCH:
            return self.loss.of_batch(output, y, batch)
        if self.seen is not None and self.seen.is_of(self.loss):
            versions = [t._version for t in tensors]
            with contextlib.suppress(NotPerExample):
                losses, steps = self.loss.of_reductions(output, y, batch)
                if steps == self.seen.steps:  # a coefficient may lead its code another way
                    return losses
            if versions != [t._version for t in tensors]:
                raise LossError(
                    "the loss writes into the model's output, and its code has changed since it was traced, so that it has to be "
                    "called again for each example; let it write into a copy, output.clone()"
                )
        return self.loss.of_slices(self.outputs.slices(tensors, batch), y, batch)


def _by_reduction(loss: ExampleLosses, outputs: Outputs, output: Any, y: Any) -> Tensor | None:
    """(B,) losses through the reduction of one of torch's own; None where the loss itself has to be called."""
    return loss.vectorised(output, y) if loss.vectorised is not None and outputs.plain() else None


def build(model: Bound, loss: ExampleLosses, call: Call) -> tuple[Pipeline, Call]:
    """Trace, rewrite, find the sites, tap, and probe on a few examples, which are returned too."""
    trainable = set(call.trainable)
    traced = rehearsed(model, call, lambda: _trace_serving(model, call))
    held = call.module.contents() if traced.reads_numbers else call.module.places(traced.constants())
    kinds = rewrite(traced, call.params, trainable)
    sites = find_sites(traced, trainable)
    uses = [plan_site(s, traced.batch) for s in sites]
    windows = {o.node: find_window(traced, o, call.params) for s in sites for o in s.operands}
    program = tap(traced, sites, uses)
    with StandStill():
        try:
            sample = draw(traced.serves, call, scramble=True)
            layouts = _layouts(traced, sites, program, sample)
        except (IndexError, RuntimeError) as e:
            if isinstance(e, PexgradError):
                raise
            sample = draw(traced.serves, call, scramble=False)
            layouts = _layouts(traced, sites, program, sample)
        outputs = Outputs(traced, layouts.outputs, [k is Output.COPIED for k in kinds])
        if call.batch > sample.batch:
            refuse_mixing_in(call.at_leaves(), traced, program, layouts.outputs)
        way, seen = _way(loss, program, outputs, sample)
    bound = _bind(traced, sites, uses, program.slots, layouts)
    same = alike(sample, targets=way is Way.BATCH)
    return Pipeline(traced, program, bound, outputs, windows, loss, way, seen, same, held), sample


def _trace_serving(model: Bound, call: Call) -> Trace:
    """A trace that holds at this batch size: the general one, or one through the branches that this size takes."""
    traced = trace(model, call)
    # a hint of one would fix what is only true of one
    for hint in (call.batch,) if call.batch > 1 else (3, 2, call.batch):
        if traced.serves(call.batch):
            break
        traced = trace(model, call, hint=hint)
    return traced


def _layouts(traced: Trace, sites: list[Site], program: Program, sample: Call) -> Layouts:
    if sample.batch < 2:  # a graph for batches of one: whatever there is belongs to the one example
        return first_layouts(traced, sites, program)
    return probe(traced, sites, program, sample)


def _way(
    loss: ExampleLosses, program: Program, outputs: Outputs, sample: Call
) -> tuple[Way, SeenLoss | None]:
    if any(outputs.copied) or sample.batch < 2:
        return Way.SLICES, None
    forward = program.run(sample.values())
    tensors = [t.detach() for t in forward.outputs]
    if _by_reduction(loss, outputs, outputs.whole(tensors), sample.y) is not None:
        return Way.SLICES, None
    way = loss.way(outputs.copy(tensors), outputs.slices(tensors, sample.batch), sample.y, sample.batch)
    if way is Way.BATCH or not outputs.plain():
        return way, None
    for change in (varied, shrunk):
        seen = _reduces(loss, outputs, change(tensors), sample)
        if seen is not None:
            return (Way.REDUCED, seen) if seen else (way, None)
    return way, None


def _reduces(
    loss: ExampleLosses, outputs: Outputs, tensors: list[Tensor], sample: Call
) -> SeenLoss | Literal[False] | None:
    """Whether reductions give each example its own number, for every batch size; None where these outputs do not tell.

    They are changed ones, in which no two numbers are alike: those of a model that has learned nothing yet tell nothing.
    """
    y, batch = sample.y, sample.batch
    steps = loss.reduces(outputs.copy(tensors), outputs.slices(tensors, batch), y, batch)
    if not steps:
        return None if steps is None else False
    try:
        found = mixing_in(lambda *of: loss.of_reductions(*of)[0], outputs.trace.output, tensors, y)
    except Exception:  # noqa: BLE001 - the loss may do what no graph can
        return False
    return SeenLoss(snapshot(loss.loss), steps) if found is None else False


def _bind(
    traced: Trace, sites: list[Site], uses: list[list[Use]], slots: list[Slots], layouts: Layouts
) -> list[BoundSite]:
    edges, bound = iter(layouts.edges), []
    for site, site_uses, slot in zip(sites, uses, slots, strict=True):
        own = tuple(next(edges) for _ in site.outputs)
        bound.append(
            BoundSite(site, site_uses, slot, own, _residual_layouts(site, site_uses, own[0], traced))
        )
    return bound


def _residual_layouts(site: Site, uses: list[Use], at: Layout, traced: Trace) -> dict[fx.Node, Layout]:
    """Where the batch is in each residual: the same part of the same fold as in the activation."""
    found = {}
    for node in nodes_needed(uses, site):
        dims = batch_dims(value(node), traced.batch)
        if len(dims) == 1:
            same = fold_factor_of(value(node), traced.batch) == at.fold
            found[node] = Layout(dims[0], at.lead, at.trail) if same else Layout(dims[0])
    return found
