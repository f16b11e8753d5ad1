"""Stage 7, for each trace: its rows against the definition, computed with the original module and plain autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..base import trees
from ..base.compare import agree_nearby, is_finite, largest_error
from ..base.nodes import where
from ..base.still import StandStill
from ..errors import ANY_MODEL, LossError, MixedExamplesError, VerificationError
from ..inputs.arguments import Options
from ..inputs.call import Call
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction
from ..operator.jacobian import Jacobian
from ..pipeline import Pipeline
from ..stages.mixing_by_shape import Mixing, first_mixing
from ..stages.mixing_inside import mixing_inside
from .strategies import grad_or_zeros, naive


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
        want = _definition(pipeline, model, at) if trace.follows(at) else None
        if want is None or not _finite(want.rows(last=True)):
            at = two.at(call.params).at_leaves()
            want = _definition(pipeline, model, at)
        _refuse_comparing(model, pipeline.losses.loss, at, want)
        wrong = _wrong(pipeline, model, at, want)
        if wrong is not None and not _agrees_elsewhere(pipeline, model, at, wrong[1]):
            raise VerificationError(_message(*wrong, differs_alone=not trace.serves(1)))
        return frozenset(k for k, r in want.rows(last=True).items() if not (is_finite(r) and bool(r.any())))


def _definition(pipeline: Pipeline, model: Bound, at: Call) -> Jacobian:
    return naive(model, pipeline.losses.loss, at)


def _refuse_comparing(model: Bound, loss: LossFunction, at: Call, want: Jacobian) -> None:
    """Raise where no example has a gradient by itself, and the batch has one: the loss compares examples."""
    small_first = sorted(want.rows(last=True).values(), key=Tensor.numel)
    if at.batch < 2 or any(bool(r.any()) for r in small_first):
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


def _wrong(pipeline: Pipeline, model: Bound, at: Call, want: Jacobian) -> tuple[str, float] | None:
    """The parameter whose rows differ the most from the definition's, and by how much; "" for the losses."""
    got, half = pipeline.jacobian(at, Options()), pipeline.trace.rounds_to_half()
    if _difference(got, want, half) is None:
        return None
    # what is zero but for rounding (a sum of normalised values, say) differs by all there is of it
    wrong = _difference(got, want, half, _definition(pipeline, model, at.moved()))
    excused = wrong is not None and wrong[0] and _copies_agree(got.rows(last=True), pipeline, model, at)
    return None if excused else wrong


def _agrees_elsewhere(pipeline: Pipeline, model: Bound, at: Call, error: float) -> bool:
    """Whether a difference is that of a few branches, on which rounding decided at this very point."""

    def agrees(part: float) -> bool:
        near = at.moved(part)
        if not pipeline.trace.follows(near):
            return False
        want = _definition(pipeline, model, near)
        return _finite(want.rows(last=True)) and _wrong(pipeline, model, near, want) is None

    return agree_nearby(error, agrees)


def _difference(
    got: Jacobian, want: Jacobian, half: bool, rounded: Jacobian | None = None
) -> tuple[str, float] | None:
    def of(parts: Callable[[Jacobian], dict[str, Tensor]]) -> tuple[str, float] | None:
        return largest_error(parts(got), parts(want), half, None if rounded is None else parts(rounded))

    return of(lambda j: {"": j.losses}) or of(lambda j: j.rows(last=True))


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


def _finite(rows: dict[str, Tensor]) -> bool:
    return all(map(is_finite, rows.values()))


# PyTorch's CPU batch-norm backward is wrong at batch size 1 for some memory layouts
_WRONG_ALONE = {torch.ops.aten.batch_norm.default}


def _copies_agree(rows: dict[str, Tensor], pipeline: Pipeline, model: Bound, at: Call) -> bool:
    """Whether a kernel at batch size 1 is at fault: each row is a part of the gradient of its example taken several times."""
    graph, outputs = pipeline.program.module.graph, pipeline.losses.outputs
    if any(outputs.copied) or all(n.target not in _WRONG_ALONE for n in graph.nodes):
        return False
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
