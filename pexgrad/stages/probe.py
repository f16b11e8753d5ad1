"""Stage 6, once per trace: do the examples mix, and where is the batch in each activation?

Where the operations do not tell (`tracked.py`) the program runs on a few examples. Changing all others must not change an
example's output; the gradient of one example's output must reach only that example's part of an activation. The second is
exactly what makes a rule's row exact, and tells the outer part of a fold from the inner one.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor, fx

from ..base.compare import largest_error
from ..base.nodes import batch_dims, returned, value, where
from ..errors import ANY_MODEL, MixedExamplesError, TraceError, first_line
from ..tracing.trace import Trace
from .few_examples import normal_like
from .layout import Anywhere, Layout, Untold, candidates
from .mixing_by_value import mixed
from .sites import Site
from .tap import Forward
from .tracked import tracked
from .trial import Others, Trial


@dataclass(frozen=True, eq=False)
class Layouts:
    """Where the batch is in the outputs (None: an output without one) and in the activations."""

    outputs: list[Layout | None]
    edges: list[Layout]


def tracked_layouts(trace: Trace, sites: list[Site]) -> Layouts | None:
    """Every layout, where the graph itself tells all of them and that the examples stay apart; before it is tapped."""
    places = tracked(trace.graph, trace.inputs, trace.batch, drawing=True)
    outputs = [places.get(n) for n in returned(trace.graph)]
    edges = [at for _, out in _activations(sites) if (at := places.get(out)) is not None]
    is_whole = None not in outputs and len(edges) == len(_activations(sites))
    return Layouts(outputs, edges) if is_whole else None


def probe(trial: Trial, sites: list[Site]) -> tuple[Layouts, list[Tensor]]:
    """Every layout and the outputs of a trial of two examples at least, or an error naming the operation that mixed them."""
    base, others = trial.run(), Others(trial)
    outputs = _output_layouts(trial, base, others)
    edges = _edge_layouts(trial, sites, base, outputs)
    if any(len(options) > 1 for options in edges):
        edges = _told_by_values(trial, others, _activations(sites), edges)
    edges = [options[0] if len(options) == 1 else Untold(*astuple(options[0])) for options in edges]
    layouts = Layouts(outputs, edges)
    apart = [i for i, at in enumerate(edges) if isinstance(at, Anywhere)]
    if apart and not _same_alone(trial, base, layouts, apart):
        site, _ = _activations(sites)[apart[0]]
        raise MixedExamplesError(
            f"the examples mix in {where(site.node)}: copies of parameters, one for each example, are put together in a way "
            "that depends on the size of the batch"
        )
    return layouts, [t.detach() for t in base.outputs]


def _output_layouts(trial: Trial, base: Forward, others: Others) -> list[Layout | None]:
    """The layout of every output in which no example changes with the others."""
    nodes = trial.program.outputs
    outputs = [list(candidates(value(n), trial.trace.batch)) for n in nodes]
    for b in sorted({0, 1, trial.batch - 1}):
        changed, after = others.run(b)
        for i, options in enumerate(outputs):
            if options:
                outputs[i] = [at for at in options if not trial.moves(at, base.outputs[i], after[i], b)]
                if not outputs[i]:
                    raise mixed(trial, changed, b)
    return [_only_one(options, where(n)) for options, n in zip(outputs, nodes, strict=True)]


def _same_alone(trial: Trial, base: Forward, at: Layouts, apart: list[int]) -> bool:
    """Whether each example's output, and its gradient in the operands of the edges `apart`, are those of a batch of one."""
    if not trial.trace.serves(1):
        return False
    for b in range(trial.batch):
        alone = trial.program.run(trial.call.examples(b, b + 1).values())
        for place, x, y in zip(at.outputs, base.outputs, alone.outputs, strict=True):
            if place is not None and not trial.agree(place.view(x, trial.batch)[b], place.view(y, 1)[0]):
                return False
        # the same function of the output for both
        here, there = (
            _gradients(forward, at.outputs, n, k, torch.Generator().manual_seed(b))
            for forward, n, k in ((base, trial.batch, b), (alone, 1, 0))
        )
        mine, own = ({str(i): _of_operand(g[i], at.edges[i]) for i in apart} for g in (here, there))
        if largest_error(mine, own, trial.trace.rounds_to_half()) is not None:
            return False
    return True


def _of_operand(g: Tensor | None, at: Layout) -> Tensor:
    """The gradient of what was expanded along the layout's dimension."""
    return torch.zeros(()) if g is None else g.sum(at.dim)


def first_layouts(trial: Trial, sites: list[Site]) -> Layouts:
    """The likeliest layouts, from shapes alone."""
    batch = trial.trace.batch
    outputs = [next(candidates(value(n), batch), None) for n in trial.program.outputs]
    return Layouts(outputs, [next(candidates(value(out), batch)) for _, out in _activations(sites)])


def _edge_layouts(
    trial: Trial, sites: list[Site], base: Forward, outputs: list[Layout | None]
) -> list[list[Layout]]:
    """The layouts of every activation in which no example's gradient reaches another's part."""
    activations, symbol = _activations(sites), trial.trace.batch
    generator = torch.Generator().manual_seed(0)
    options: list[list[Layout]] = [list(candidates(value(out), symbol)) for _, out in activations]
    for b in range(trial.batch):
        grads = _gradients(base, outputs, trial.batch, b, generator)
        for i, g in enumerate(grads):
            if g is not None:
                options[i] = [at for at in options[i] if _only(at, g, trial.batch, b)]
                site, out = activations[i]
                if not options[i] and site.is_copies:
                    options[i] = [Anywhere(batch_dims(value(out), symbol)[0])]
                if not options[i]:
                    raise MixedExamplesError(
                        f"the examples mix in {where(site.node)}: the output of example {b} depends on other parts of its value, "
                        f"of shape {tuple(value(out).shape)}, than one dimension (or one part of a fold) that is the batch. "
                        f"{_CHANGING_PLACES}"
                    )
    return options


_CHANGING_PLACES = (
    "Where they only change places (tokens of all examples, sorted by expert), let each example keep its own, or "
    f"{ANY_MODEL}"
)


def _told_by_values(
    trial: Trial, others: Others, activations: list[tuple[Site, fx.Node]], edges: list[list[Layout]]
) -> list[list[Layout]]:
    """Where gradients were zero: the layouts in which no example's values change with the other examples."""
    before, left = trial.values(), list(edges)
    for b in range(trial.batch):
        after = others.changed(b).values()
        for i, (site, out) in enumerate(activations):
            seen = _where_data_meets(out) if site.is_copies else out
            if len(left[i]) > 1 and seen in before:
                still = [at for at in left[i] if not trial.moves(at, before[seen], after[seen], b)]
                left[i] = still or left[i]
    return left


def _where_data_meets(copies: fx.Node) -> fx.Node:
    """The operation that a parameter was expanded for: the copies themselves are the same whatever the examples are."""
    same = (n for n in copies.users if isinstance(value(n), Tensor) and value(n).shape == value(copies).shape)
    return next(same, copies)


def _only_one(options: list[Layout], place: str) -> Layout | None:
    """The layout of an output, where there is one to choose."""
    if len(options) > 1:
        raise TraceError(
            f"the model's output has its examples in a fold with other positions, and none of its numbers (of {place}) differs "
            "between the first examples, so which position is whose cannot be told: return it with the batch on a dimension of "
            "its own, or call with other examples or parameters first"
        )
    return options[0] if options else None


def _activations(sites: list[Site]) -> list[tuple[Site, fx.Node]]:
    return [(site, out) for site in sites for out in site.outputs]


def _gradients(
    base: Forward, outputs: list[Layout | None], batch: int, b: int, generator: torch.Generator
) -> list[Tensor | None]:
    """The gradient of a random function of example b's output with respect to every activation."""
    total: Tensor | None = None
    for out, at in zip(base.outputs, outputs, strict=True):
        if at is not None and out.requires_grad:
            part = at.view(out, batch)[b]
            term = (part * normal_like(part, generator)).sum()
            term = term.real if term.is_complex() else term
            total = term if total is None else total + term
    edges = [e for e in base.edges if e is not None]
    if total is None or not edges:
        return [None] * len(base.edges)
    try:
        grads = iter(torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True))
    except RuntimeError as e:
        raise TraceError(f"autograd cannot differentiate the model on a test batch: {first_line(e)}") from e
    return base.cotangents(None if e is None else next(grads) for e in base.edges)


def _only(at: Layout, g: Tensor, batch: int, b: int) -> bool:
    """Whether `g` is zero outside example b."""
    if isinstance(at, Anywhere):
        return True
    others = [i for i in range(batch) if i != b]
    return not bool(torch.nan_to_num(at.view(g, batch)[others]).any())
