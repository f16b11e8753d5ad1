"""Runs of a program on some examples, to be compared with runs where others stand in the places of some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..base.compare import largest_error
from ..base.numerics import is_inexact
from ..inputs.call import Call
from ..tracing.trace import Trace
from .few_examples import all_but, others_exchanged
from .layout import Layout
from .tap import Forward, Program

Change = Callable[[Tensor, int, torch.Generator], Tensor]  # (b, ...) with all examples but one changed


@dataclass(frozen=True, eq=False)
class Trial:
    """A program, and the examples that it is tried on."""

    trace: Trace
    program: Program
    call: Call

    @property
    def batch(self) -> int:
        """The number of examples."""
        return self.call.batch

    def run(self) -> Forward:
        """What the program gives for the examples."""
        return self.program.run(self.call.values())

    def values(self) -> dict[fx.Node, Tensor]:
        """Every value on the way."""
        recorder, values = _Recorder(self.program.module), self.call.values()
        with self.program.running(values):
            recorder.run(*values)
        return recorder.kept

    def of(self, call: Call) -> Trial:
        """The same program on other examples."""
        return Trial(self.trace, self.program, call)

    def moves(self, at: Layout, before: Tensor, after: Tensor, b: int) -> bool:
        """Whether example b differs between two of its values by more than rounding."""
        return moves(at, before, after, self.batch, b)

    def agree(self, got: Tensor, want: Tensor) -> bool:
        """Whether values that were computed in batches of two sizes are the same but for rounding."""
        got, want = got.detach(), want.detach()
        if is_inexact(got):
            return largest_error({"": got}, {"": want}, self.trace.rounds_to_half()) is None
        return torch.equal(got, want)


class Others:
    """A trial with all examples but one changed: with noise, or where the model takes no such numbers (ids in a table of
    floats, probabilities) by the values of one another.
    """

    def __init__(self, trial: Trial):
        self._trial = trial
        self._change: Change = all_but
        self._generator = torch.Generator().manual_seed(0)

    def changed(self, b: int) -> Trial:
        """The trial with all but example b changed."""
        return self._trial.of(self._trial.call.with_inputs(lambda t: self._change(t, b, self._generator)))

    def run(self, b: int) -> tuple[Trial, list[Tensor]]:
        """The same, and its outputs."""
        changed = self.changed(b)
        try:
            return changed, changed.run().outputs
        except (IndexError, RuntimeError):
            if self._change is others_exchanged:
                raise
            self._change = others_exchanged
            return self.run(b)


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


def moves(at: Layout, before: Tensor, after: Tensor, batch: int, b: int) -> bool:
    """Whether example b differs between two values of one computation by more than rounding."""
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
