"""Stage 7, for each trace: its rows against the definition, computed with the original module and plain autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import trees
from ..base.compare import Differences, agree_nearby, largest_error
from ..base.nodes import where
from ..base.still import StandStill
from ..errors import ANY_MODEL, LossError, MixedExamplesError, VerificationError
from ..inputs.arguments import Options
from ..inputs.call import Call
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction
from ..pipeline import Pipeline
from ..stages.mixing_by_shape import Mixing, first_mixing
from ..stages.mixing_inside import mixing_inside
from .strategies import grad_or_zeros, one_by_one


def verify(pipeline: Pipeline, model: Bound, call: Call, few: Call) -> frozenset[str]:
    """Raise where the pipeline's rows or losses differ from the definition on the first two of a few examples.

    They are compared at their parameters, or at those of the call itself. Returns the parameters of which that tells nothing:
    their gradients are zero there, or no numbers.
    """
    trace = pipeline.trace
    two = few.examples(0, 2) if trace.serves(2) else few
    if not trace.follows(two.at(call.params)):  # the second was made up from the first, the user's own
        two = few.examples(0, 1)
    with StandStill():
        at = two
        # changed parameters may lead the model's code another way, or leave its domain: then the given ones decide
        compared = _compared(pipeline, model, at) if trace.follows(at) else None
        if compared is None or not compared.rows.are_of_numbers():
            at = two.at(call.params).at_leaves()
            compared = _compared(pipeline, model, at)
        if compared.rows.are_of_numbers() and not compared.rows.telling():
            _refuse_comparing(model, pipeline.losses.loss, at)
        wrong = _wrong(pipeline, model, at, compared)
        if wrong is not None and not _agrees_elsewhere(pipeline, model, at, wrong[1]):
            raise VerificationError(_message(*wrong, differs_alone=not trace.serves(1)))
        return frozenset(call.trainable) - compared.rows.telling()


@dataclass(frozen=True)
class _Compared:
    """A pipeline's losses and rows beside the definition's."""

    losses: Differences
    rows: Differences

    def largest(self) -> tuple[str, float] | None:
        """The parameter, or "" for the losses, with the largest relative error that is more than rounding."""
        return self.losses.largest() or self.rows.largest()


def _compared(pipeline: Pipeline, model: Bound, at: Call, *, rounded: bool = False) -> _Compared:
    """All that is compared; with `rounded`, beside what other rounding of the parameters does."""
    points = (at, at.moved()) if rounded else (at,)
    with torch.enable_grad():
        definitions = [[*one_by_one(model, pipeline.losses.loss, point)] for point in points]
    own, half = pipeline.jacobian(at, Options()), pipeline.trace.rounds_to_half()
    found = _Compared(Differences(half), Differences(half))
    for loss, same in zip(own.losses, zip(*definitions, strict=True), strict=True):
        found.losses.add("", loss, *(value for value, _ in same))
    for name, rows in own.rows_in_turn():  # of a large model, all rows together may have no room
        for row, same in zip(rows, zip(*definitions, strict=True), strict=True):
            found.rows.add(name, row, *(expected[name] for _, expected in same))
    return found


def _refuse_comparing(model: Bound, loss: LossFunction, at: Call) -> None:
    """Raise where no example has a gradient by itself, and the batch has one: the loss compares examples."""
    if at.batch < 2:
        return
    try:
        given = at.copied()
        with torch.enable_grad():
            value = loss.loss(model.run(given.params, at.x), at.y).sum()
        params = [given.params[k] for k in at.trainable]
        grads = torch.autograd.grad(value, params, allow_unused=True)
    except Exception:  # noqa: BLE001 - it may take single examples only
        return
    if any(g is not None and _is_felt(g, p, value) for g, p in zip(grads, params, strict=True)):
        raise LossError(
            "the loss of an example by itself has no gradient, and that of several has one: it compares the examples of a batch "
            "(a contrastive loss, say), so that there is no gradient of one example's own loss. Give each example in x what it "
            "is compared with; where rows of zeros are what you want, pass verify=False"
        )


def _is_felt(g: Tensor, p: Tensor, value: Tensor) -> bool:
    """Whether a gradient of a value is more than rounding."""
    rounding = 1e3 * min(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps)
    return bool(
        torch.linalg.vector_norm(g) * (1 + torch.linalg.vector_norm(p.detach()))
        > rounding * value.detach().abs()
    )


def _wrong(pipeline: Pipeline, model: Bound, at: Call, compared: _Compared) -> tuple[str, float] | None:
    """The parameter whose rows differ the most from the definition's, and by how much; "" for the losses."""
    if compared.largest() is None:
        return None
    # what is zero but for rounding (a sum of normalised values, say) differs by all there is of it
    wrong = _compared(pipeline, model, at, rounded=True).largest()
    excused = wrong is not None and wrong[0] and _copies_agree(pipeline, model, at)
    return None if excused else wrong


def _agrees_elsewhere(pipeline: Pipeline, model: Bound, at: Call, error: float) -> bool:
    """Whether a difference is that of a few branches, on which rounding decided at this very point."""

    def agrees(part: float) -> bool:
        near = at.moved(part)
        if not pipeline.trace.follows(near):
            return False
        compared = _compared(pipeline, model, near)
        return compared.rows.are_of_numbers() and _wrong(pipeline, model, near, compared) is None

    return agree_nearby(error, agrees)


def refuse_mixing(pipeline: Pipeline) -> None:
    """Raise where the model or the loss looks at the whole batch: what the probe saw of some may not hold for others."""
    trace, program = pipeline.trace, pipeline.program
    found = first_mixing(program.module.graph, trace.inputs, program.outputs, trace.batch) or pipeline.mixing
    if found is not None:
        raise MixedExamplesError(f"the model's output depends on {_what(found)}; {_REMEDY}")
    for node in program.module.graph.nodes:
        if (found := mixing_inside(node, trace.batch)) is not None:
            raise MixedExamplesError(
                f"in {where(node)}, forward or backward, what is done to an example depends on {_what(found)}; {_REMEDY}"
            )
    found = pipeline.losses.mixing()
    if found is not None:
        raise MixedExamplesError(f"the losses depend on {_what(found)}; {_REMEDY}")


_REMEDY = (
    "an example's gradient is defined only where its loss depends on that example alone, and what has no effect on the first "
    "examples may have one on others. Compute over every dimension but the batch; where you know that it never has any "
    "effect, pass verify=False"
)


def _what(found: Mixing) -> str:
    if found.of_size:
        return f"the number of examples, or an example's place among them, through {where(found.node)}"
    return f"{where(found.node)}, which looks at all examples of the batch at once"


# PyTorch's CPU batch-norm backward is wrong at batch size 1 for some memory layouts
_WRONG_ALONE = {torch.ops.aten.batch_norm.default}


def _copies_agree(pipeline: Pipeline, model: Bound, at: Call) -> bool:
    """Whether a kernel at batch size 1 is at fault: each row is a part of the gradient of its example taken several times."""
    graph, outputs = pipeline.program.module.graph, pipeline.losses.outputs
    if any(outputs.copied) or all(n.target not in _WRONG_ALONE for n in graph.nodes):
        return False
    rows = pipeline.jacobian(at, Options()).rows(last=True)
    return all(
        _copies_agree_on({k: r[b] for k, r in rows.items()}, pipeline, model, at.take([b] * copies))
        for b in range(at.batch)
        for copies in (2, 3)
    )


def _copies_agree_on(row: dict[str, Tensor], pipeline: Pipeline, model: Bound, at: Call) -> bool:
    given = at.copied()
    with torch.enable_grad():
        tensors = trees.tensors(model.run(given.params, at.x))
        if len(tensors) != len(pipeline.losses.outputs.layouts):
            return False
        part = pipeline.losses(tensors, at.y, at.batch).sum() / at.batch
        want = dict(zip(row, grad_or_zeros(part, [given.params[k] for k in row]), strict=True))
    return largest_error(row, want, pipeline.trace.rounds_to_half()) is None


def _message(name: str, error: float, *, differs_alone: bool) -> str:
    what = f"the gradient of '{name}'" if name else "the loss"
    why = (
        "its code asks for the batch size, and treats a batch of one, by which an example's gradient is defined, in another way"
        if differs_alone
        else "a cache, a hook, global state or data-dependent code?"
    )
    return (
        f"{what} differs from the definition on a test batch by a relative error of {error:.1e}, so the traced graph "
        f"does not compute what the model does ({why}); {ANY_MODEL}"
    )
