"""One input signature, traced: all stages put together, and the function that they make."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .base.fakes import HINT
from .base.modes import without_autocast
from .base.nodes import batch_dims, fold_factor_of, value
from .base.still import StandStill
from .errors import ANY_MODEL, LossError, OneExampleError, PexgradError, TraceError
from .inputs.arguments import Options
from .inputs.call import Call
from .inputs.held import Held, Place
from .inputs.rebind import Bound
from .losses.decide import Losses, decided
from .losses.loss import LossFunction, refuse_reading_parameters
from .losses.outputs import Outputs
from .operator.component import Term
from .operator.jacobian import Jacobian, joined
from .operator.paths import Path, Paths
from .operator.pullback import Window, find_window
from .stages.alone import mixing_alone
from .stages.cotangents import cotangents, way_out
from .stages.evaluate import Backward, BoundSite, Kept
from .stages.few_examples import alike, draw, still_alike, ways_to_draw
from .stages.flow import analyse
from .stages.layout import Layout
from .stages.mixing_by_shape import Mixing
from .stages.mixing_by_value import refuse_mixing_in
from .stages.plan import Use, plan_site
from .stages.probe import Layouts, first_layouts, probe, tracked_layouts
from .stages.rewrite import rewrite
from .stages.sites import Operand, Site, find_sites
from .stages.tap import Program, tap
from .stages.trial import Trial
from .tracing.rehearsal import rehearsed
from .tracing.trace import Trace, trace


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A traced model: from parameters and inputs to the Jacobian."""

    trace: Trace
    program: Program
    sites: list[BoundSite]
    windows: dict[fx.Node, Window | None]
    paths: dict[fx.Node, tuple[Path, ...]]  # of those without a window
    losses: Losses
    alike: tuple[int, ...]  # of the compared tensors, those that the examples could not tell apart so far
    held: dict[Place, Held]  # tensors beside parameters and buffers that the trace is made of
    mixing: Mixing | None  # an operation in which examples mix when it is tried by itself

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
        losses, _, terms, values = self._evaluate(at, options)
        with _arithmetic(losses, options):
            terms = joined(terms)  # before they go on, so that the steps of a layer go together
            if any(t.paths for t in terms):
                terms = joined([further for t in terms for further in t.along_paths(values)])
        leaves = {k: at.params[k] for k in at.trainable}
        # a copy: losses may be the very memory of an output, and that of a parameter
        own = losses if options.create_graph else losses.detach().clone()
        return Jacobian(own, leaves, terms, options.create_graph)

    def uses(self, at: Call, options: Options) -> list[tuple[BoundSite, Operand, Term]]:
        """Every use of every parameter, with its factor, for `explain`."""
        losses, places, terms, values = self._evaluate(at, options)
        with _arithmetic(losses, options):
            return [
                (site, operand, further)
                for (site, operand), term in zip(places, terms, strict=True)
                for further in term.along_paths(values)
            ]

    def _evaluate(
        self, at: Call, options: Options
    ) -> tuple[Tensor, list[tuple[BoundSite, Operand]], list[Term], dict[fx.Node, Any]]:
        """The losses, for each use of each parameter where it is and its term, and the values that paths take."""
        create_graph = options.create_graph
        forward = self.program.run(at.values())
        out, views = way_out(forward.outputs), [(t, t._version) for t in forward.outputs if t._is_view()]
        nodes = [t.grad_fn for t in forward.outputs]
        with torch.enable_grad():
            losses = self.losses(forward.outputs, at.y, at.batch)
        if self.losses.loss.vectorised is None:  # its code may do something else than when it was looked at
            refuse_reading_parameters(losses, at, nodes)
        if any(t._version != version for t, version in views):
            raise LossError(
                "the loss writes into the model's output, which shares its memory with a value before it, so that gradients "
                "would go past the model's last operation; let the loss write into a copy, output.clone()"
            )
        found = cotangents(forward, losses, out, [s.layouts for s in self.sites], create_graph)
        backward = Backward(forward, at.batch, options.conv_rule, create_graph)
        places, terms = [], []
        with _arithmetic(losses, options):
            for site, own in zip(self.sites, found, strict=True):
                for operand, v, factor in backward.factors(site, own):
                    places.append((site, operand))
                    window, paths = self.windows[operand.node], self.paths[operand.node]
                    reached = operand.params if window is None else (window.param,)
                    terms.append(Term(v, reached, window, factor, paths))
        return losses, places, terms, {n: forward.values[n] for n in self.program.further}


@contextlib.contextmanager
def _arithmetic(losses: Tensor, options: Options) -> Iterator[None]:
    """What factors are computed in."""
    with torch.set_grad_enabled(options.create_graph), without_autocast(losses.device.type):
        yield


def build(model: Bound, loss: LossFunction, call: Call) -> tuple[Pipeline, Call]:
    """Trace, rewrite, find the sites, tap, and probe on a few examples, which are returned too."""
    trainable = set(call.trainable)
    traced = rehearsed(model, call, lambda: _trace_serving(model, call))
    held = (
        call.module.contents()
        if traced.reads_numbers
        else call.module.places([*traced.constants(), *traced.asked])
    )
    copied = rewrite(traced, call)
    flow = analyse(traced, trainable)
    sites = find_sites(traced, flow)
    uses = [plan_site(s, traced.batch) for s in sites]
    windows = {o.node: find_window(traced, o, call.params) for s in sites for o in s.operands}
    search = Paths(traced, flow, call.params)
    paths = {n: () if window else search.to(n) for n, window in windows.items()}
    on_paths = dict.fromkeys(
        n for own in paths.values() for path in own for step in path.steps for n in step.nodes
    )
    told = tracked_layouts(traced, sites)
    with StandStill():
        mixing = mixing_alone(traced.graph, traced.inputs, traced.batch) if told is None else None
    program = tap(traced, sites, uses, [*on_paths])
    with StandStill():
        few, (layouts, out) = _probed(traced, sites, program, call, told, ways_to_draw(traced.serves, call))
        outputs = Outputs(traced, layouts.outputs, copied)
        if told is None and call.batch > few.batch:
            refuse_mixing_in(Trial(traced, program, call.at_leaves()), layouts.outputs)
        losses = decided(loss, outputs, out, few)
    bound = _bind(traced, sites, uses, program.kept, layouts)
    same = alike(few, inputs=told is None, targets=losses.takes_batches())
    return Pipeline(traced, program, bound, windows, paths, losses, same, held, mixing), few


def _trace_serving(model: Bound, call: Call) -> Trace:
    """A trace that holds at this batch size: the general one, or one through the branches that this size takes."""
    first: TraceError | None = None
    serves_others = False
    # tracing at a batch size of one would fix what is only true of one, and at HINT what a shape of that size is compared with
    others = (call.batch,) if 1 < call.batch != HINT else (3, 2, call.batch)
    for hint in dict.fromkeys((HINT, *others)):
        try:
            traced = trace(model, call, hint)
        except TraceError as e:  # there may be room for fewer examples than a trace pretends to see
            first = first or e
        else:
            if traced.serves(call.batch):
                return traced
            serves_others = True
    if serves_others and call.batch == 1:
        raise OneExampleError(
            "the model, or a function of torch that it calls, treats a batch of one in another way than larger ones, and has no "
            f"graph of it; give it two examples or more, or {ANY_MODEL}"
        )
    raise first or TraceError(f"the model has no graph that serves a batch of {call.batch}; {ANY_MODEL}")


def _probed(
    traced: Trace, sites: list[Site], program: Program, call: Call, told: Layouts | None, ways: Sequence[str]
) -> tuple[Call, tuple[Layouts, list[Tensor]]]:
    """A few examples that the model takes, made up in one of these ways, and what they tell."""
    made_up, *others = ways
    few = draw(traced.serves, call, made_up)
    try:
        return few, _layouts(Trial(traced, program, few), sites, told)
    except (IndexError, RuntimeError) as e:  # numbers that the model does not take
        if isinstance(e, PexgradError):
            raise
    if others:
        return _probed(traced, sites, program, call, told, others)
    # changed parameters may have left the model's domain: a covariance, probabilities
    few = few.at(call.params).at_leaves()
    return few, _layouts(Trial(traced, program, few), sites, told)


def _layouts(trial: Trial, sites: list[Site], told: Layouts | None) -> tuple[Layouts, list[Tensor]]:
    if (
        told is None and trial.batch < 2
    ):  # a graph for batches of one: whatever there is belongs to the one example
        told = first_layouts(trial, sites)
    return probe(trial, sites) if told is None else (told, trial.run().outputs)


def _bind(
    traced: Trace,
    sites: list[Site],
    uses: list[list[Use]],
    kept: list[dict[fx.Node, fx.Node]],
    layouts: Layouts,
) -> list[BoundSite]:
    edges, bound = iter(layouts.edges), []
    for site, site_uses, nodes in zip(sites, uses, kept, strict=True):
        own = tuple(next(edges) for _ in site.outputs)
        residuals = {n: Kept(k, _residual_layout(n, own[0], traced)) for n, k in nodes.items()}
        bound.append(BoundSite(site, site_uses, residuals, own))
    return bound


def _residual_layout(node: fx.Node, at: Layout, traced: Trace) -> Layout | None:
    """Where the batch is in a residual, if it has one: the same part of the same fold as in the activation."""
    dims = batch_dims(value(node), traced.batch)
    if len(dims) != 1:
        return None
    same = fold_factor_of(value(node), traced.batch) == at.fold
    return Layout(dims[0], at.lead, at.trail) if same else Layout(dims[0])
