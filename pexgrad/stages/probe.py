"""Stage 6, once per trace: do the examples mix, and where is the batch in each activation?

The program runs on a few examples. Changing all others must not change an example's output; the gradient of one
example's output must reach only that example's part of an activation. The second is exactly what makes a rule's
row exact, and tells the outer part of a fold from the inner one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, fx

from ..base.compare import largest_error
from ..base.nodes import batch_dims, value, where
from ..base.numerics import is_inexact
from ..errors import MixedExamplesError, TraceError, first_line
from ..inputs.call import Call
from ..tracing.trace import Trace
from .layout import Anywhere, Layout, Untold, candidates
from .sample import all_but, normal_like, others_exchanged
from .sites import Site
from .tap import Forward, Program

Change = Callable[[Tensor, int, torch.Generator], Tensor]  # (b, ...) with all examples but one changed


@dataclass(frozen=True, eq=False)
class Layouts:
    """Where the batch is in the outputs (None: an output without one) and in the activations."""

    outputs: list[Layout | None]
    edges: list[Layout]


def probe(trace: Trace, sites: list[Site], program: Program, sample: Call) -> tuple[Layouts, list[Tensor]]:
    """Every layout and the outputs for `sample`, or an error naming the operation that mixed its examples: two at least."""
    batch, generator = sample.batch, torch.Generator().manual_seed(0)
    base, others = program.run(sample.values()), _Others(program, sample)
    outputs = [list(candidates(value(n), trace.batch)) for n in program.outputs]
    for b in sorted({0, 1, batch - 1}):
        changed, after = others.run(b)
        for i, options in enumerate(outputs):
            if options:
                outputs[i] = [at for at in options if not _moves(at, base.outputs[i], after[i], batch, b)]
                if not outputs[i]:
                    raise _mixed(trace, program, sample, changed, b)
    chosen = [_only_one(options, where(n)) for options, n in zip(outputs, program.outputs, strict=True)]
    edges = _edge_layouts(trace, sites, base, chosen, batch, generator)
    if any(len(options) > 1 for options in edges):
        edges = _told_by_values(program, _activations(sites), edges, sample, others)
    edges = [options[0] if len(options) == 1 else Untold(*astuple(options[0])) for options in edges]
    apart = [i for i, at in enumerate(edges) if isinstance(at, Anywhere)]
    if apart and not _same_alone(trace, program, sample, base, Layouts(chosen, edges), apart):
        site, _ = _activations(sites)[apart[0]]
        raise MixedExamplesError(
            f"the examples mix in {where(site.node)}: copies of parameters, one for each example, are put together in a way "
            "that depends on the size of the batch"
        )
    return Layouts(chosen, edges), [t.detach() for t in base.outputs]


def refuse_mixing_in(call: Call, trace: Trace, program: Program, outputs: list[Layout | None]) -> None:
    """Raise where an example of the whole batch, of which the probe sees a few, has another output there than alone.

    That is decided by whether it moves with the others: what is alone goes through other kernels, and may be rounded
    to the other side of a step.
    """
    batch, half = call.batch, trace.rounds_to_half()
    size = next((n for n in (1, 2, 3) if trace.serves(n)), batch)
    if size >= batch:
        return
    whole = [t.detach() for t in program.run(call.values()).outputs]
    for b in sorted({0, batch // 2, batch - 1}):
        alone = program.run(call.take([b] * size).values()).outputs
        pairs = [(at, x, y) for at, x, y in zip(outputs, whole, alone, strict=True) if at is not None]
        if all(_agree(at.view(x, batch)[b], at.view(y, size)[0], half) for at, x, y in pairs):
            continue
        try:
            changed, after = _Others(program, call).run(b)
        except (IndexError, RuntimeError):  # values that do not fit one another
            continue
        if any(
            at is not None and _moves(at, x, y, batch, b)
            for at, x, y in zip(outputs, whole, after, strict=True)
        ):
            raise _mixed(trace, program, call, changed, b)


class _Others:
    """A sample with all examples but one changed: with noise, or where the model takes no such numbers (ids in a table of
    floats, probabilities) by the values of one another.
    """

    def __init__(self, program: Program, sample: Call):
        self._program, self._sample = program, sample
        self._change: Change = all_but
        self._generator = torch.Generator().manual_seed(0)

    def changed(self, b: int) -> Call:
        """The sample with all but example b changed."""
        return self._sample.with_inputs(lambda t: self._change(t, b, self._generator))

    def run(self, b: int) -> tuple[Call, list[Tensor]]:
        """The same, and its outputs."""
        changed = self.changed(b)
        try:
            return changed, self._program.run(changed.values()).outputs
        except (IndexError, RuntimeError):
            if self._change is others_exchanged:
                raise
            self._change = others_exchanged
            return self.run(b)


def _same_alone(
    trace: Trace, program: Program, sample: Call, base: Forward, at: Layouts, apart: list[int]
) -> bool:
    """Whether each example's output, and its gradient in the operands of the edges `apart`, are those of a batch of one."""
    if not trace.serves(1):
        return False
    batch, half = sample.batch, trace.rounds_to_half()
    for b in range(batch):
        alone = program.run(sample.values_of(b))
        for place, x, y in zip(at.outputs, base.outputs, alone.outputs, strict=True):
            if place is not None and not _agree(place.view(x, batch)[b], place.view(y, 1)[0], half):
                return False
        # the same function of the output for both
        here, there = (
            _gradients(forward, at.outputs, n, k, torch.Generator().manual_seed(b))
            for forward, n, k in ((base, batch, b), (alone, 1, 0))
        )
        mine, own = ({str(i): _of_operand(g[i], at.edges[i]) for i in apart} for g in (here, there))
        if largest_error(mine, own, half) is not None:
            return False
    return True


def _agree(got: Tensor, want: Tensor, half: bool) -> bool:
    """Whether the values of two batch sizes are the same but for rounding."""
    got, want = got.detach(), want.detach()
    if is_inexact(got):
        return largest_error({"": got}, {"": want}, half) is None
    return torch.equal(got, want)


def _of_operand(g: Tensor | None, at: Layout) -> Tensor:
    """The gradient of what was expanded along the layout's dimension."""
    return torch.zeros(()) if g is None else g.sum(at.dim)


def first_layouts(trace: Trace, sites: list[Site], program: Program) -> Layouts:
    """The likeliest layouts, from shapes alone."""
    outputs = [next(candidates(value(n), trace.batch), None) for n in program.outputs]
    return Layouts(outputs, [next(candidates(value(out), trace.batch)) for s in sites for out in s.outputs])


def _moves(at: Layout, before: Tensor, after: Tensor, batch: int, b: int) -> bool:
    """Whether example b changed."""
    return _differ(at.view(before, batch)[b], at.view(after, batch)[b])


def _differ(x: Tensor, y: Tensor) -> bool:
    """Whether two values of one computation differ by more than rounding."""
    x, y = x.detach(), y.detach()
    if not is_inexact(x):
        return not torch.equal(x, y)
    if x.numel() == 0 or torch.equal(x, y):
        return False
    x, y = torch.nan_to_num(x), torch.nan_to_num(y)
    return bool((x - y).abs().max() > 64 * torch.finfo(x.dtype).eps * x.abs().max().clamp(min=1e-30))


def _edge_layouts(
    trace: Trace,
    sites: list[Site],
    base: Forward,
    outputs: list[Layout | None],
    batch: int,
    generator: torch.Generator,
) -> list[list[Layout]]:
    """The layouts of every activation in which no example's gradient reaches another's part."""
    activations = _activations(sites)
    options: list[list[Layout]] = [list(candidates(value(out), trace.batch)) for _, out in activations]
    for b in range(batch):
        grads = _gradients(base, outputs, batch, b, generator)
        for i, g in enumerate(grads):
            if g is not None:
                options[i] = [at for at in options[i] if _only(at, g, batch, b)]
                site, out = activations[i]
                if not options[i] and site.is_copies:
                    options[i] = [Anywhere(batch_dims(value(out), trace.batch)[0])]
                if not options[i]:
                    raise MixedExamplesError(
                        f"the examples mix in {where(site.node)}: the output of example {b} depends on other parts of its value, "
                        f"of shape {tuple(value(out).shape)}, than one dimension (or one part of a fold) that is the batch"
                    )
    return options


def _told_by_values(
    program: Program,
    activations: list[tuple[Site, fx.Node]],
    edges: list[list[Layout]],
    sample: Call,
    others: _Others,
) -> list[list[Layout]]:
    """Where gradients were zero: the layouts in which no example's values change with the other examples."""
    before = _all_values(program, sample)
    left = list(edges)
    for b in range(sample.batch):
        after = _all_values(program, others.changed(b))
        for i, (site, out) in enumerate(activations):
            seen = _where_data_meets(out) if site.is_copies else out
            if len(left[i]) > 1 and seen in before:
                still = [at for at in left[i] if not _moves(at, before[seen], after[seen], sample.batch, b)]
                left[i] = still or left[i]
    return left


def _where_data_meets(copies: fx.Node) -> fx.Node:
    """The operation that a parameter was expanded for: the copies themselves are the same whatever the examples are."""
    same = (n for n in copies.users if isinstance(value(n), Tensor) and value(n).shape == value(copies).shape)
    return next(same, copies)


def _all_values(program: Program, call: Call) -> dict[fx.Node, Tensor]:
    recorder = _Recorder(program.module)
    with torch.enable_grad():
        recorder.run(*call.values())
    return recorder.kept


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


# --- the first operation that mixed -----------------------------------------------------------------


class _Recorder(fx.Interpreter):
    """Keeps every value of a run."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.kept: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.kept[n] = result.detach().clone()
        return result


def _mixed(trace: Trace, program: Program, before: Call, after: Call, b: int) -> MixedExamplesError:
    runs = [_all_values(program, call) for call in (before, after)]
    node = _first_mixing(trace, program.module, runs[0], runs[1], before.batch, b)
    at = f" first in {where(node)}" if node is not None else ""
    return MixedExamplesError(
        f"the output of one example depends on another example: they mix{at}. Per-example gradients are defined only "
        "where each example's output depends on that example alone; compute over every dimension but the batch"
    )


def _first_mixing(
    trace: Trace,
    module: fx.GraphModule,
    before: dict[fx.Node, Tensor],
    after: dict[fx.Node, Tensor],
    batch: int,
    b: int,
) -> fx.Node | None:
    for node in module.graph.nodes:
        if node not in before or node.op == "placeholder":
            continue
        x, y = before[node], after[node]
        options = list(candidates(value(node), trace.batch))
        if options and all(_moves(at, x, y, batch, b) for at in options):
            return node
        if not batch_dims(value(node), trace.batch) and x.shape == y.shape and not torch.equal(x, y):
            return node
    return None
