"""Stage 7, once per trace: its rows against the definition, computed with the original module and plain autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import trees
from .arguments import Options
from .compare import largest_error
from .errors import ANY_MODEL, VerificationError
from .loss import ExampleLosses
from .pipeline import At, Pipeline
from .rebind import Bound
from .sample import Sample
from .still import StandStill
from .strategies import naive


def verify(
    pipeline: Pipeline,
    model: Bound,
    loss: ExampleLosses,
    params: dict[str, Tensor],
    trainable: list[str],
    sample: Sample,
) -> None:
    """Raise where the pipeline's rows or losses differ from the definition on the first two examples."""
    buffers = list(model.buffers().values())
    half = pipeline.trace.rounds_to_half()

    def follows(at: Sample) -> bool:
        return pipeline.trace.follows(at.params.values(), buffers, at.inputs())

    two = sample.first(2) if pipeline.trace.serves(2) else sample
    if not follows(two.at(params)):  # the second was made up from the first, which alone is the user's own
        two = sample.first(1)
    original = two.at({k: p.detach().requires_grad_(k in trainable) for k, p in params.items()})
    for at in (two, original):
        if at is two and not follows(at):
            continue  # the changed parameters lead the model's code another way
        with StandStill():
            here = At(at.params, buffers, at.x, at.y, at.batch)
            want = naive(model, loss, here, trainable, False)
            if not _finite(want.rows()) and at is two:
                continue  # the changed parameters leave the model's domain; the given ones decide
            got = pipeline.jacobian(here, trainable, Options())
            rows = got.rows()
            wrong = largest_error({"": got.losses}, {"": want.losses}, half) or largest_error(
                rows, want.rows(), half
            )
            if wrong is None:
                return
            # what is zero but for rounding (a sum of normalised values, say) differs by all there is of it
            rounded = naive(model, loss, _rounded_otherwise(here), trainable, False)
            wrong = largest_error(
                {"": got.losses}, {"": want.losses}, half, {"": rounded.losses}
            ) or largest_error(rows, want.rows(), half, rounded.rows())
            if wrong is not None and not (wrong[0] and _pairs_agree(rows, pipeline, model, at)):
                raise VerificationError(_message(*wrong))
        return


def _rounded_otherwise(at: At) -> At:
    """The same at parameters that differ by a rounding or two of each element."""

    def moved(p: Tensor) -> Tensor:
        signs = torch.ones(p.numel(), device=p.device)
        signs[::2] = -1
        step = 2 * torch.finfo(p.dtype).eps * signs.reshape(p.shape)
        return (p.detach() * (1 + step.to(p.dtype))).requires_grad_(p.requires_grad)

    return at._replace(params={k: moved(p) if p.requires_grad else p for k, p in at.params.items()})


def _finite(rows: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(r).all()) for r in rows.values())


def _pairs_agree(rows: dict[str, Tensor], pipeline: Pipeline, model: Bound, at: Sample) -> bool:
    """Whether each row is half the gradient of its example taken twice: then a kernel at batch size 1 is at fault.

    PyTorch's CPU batch-norm backward, for one, is wrong at batch size 1 for some memory layouts.
    """
    if any(pipeline.outputs.copied):
        return False
    return all(
        _pair_agrees({k: r[b] for k, r in rows.items()}, pipeline, model, at, b) for b in range(at.batch)
    )


def _pair_agrees(row: dict[str, Tensor], pipeline: Pipeline, model: Bound, at: Sample, b: int) -> bool:
    args, kwargs = trees.as_call(trees.take(at.x, [b, b]))
    with torch.enable_grad():
        tensors = trees.tensors(model.fresh(at.params)(*args, **kwargs))
        if len(tensors) != len(pipeline.outputs.layouts):
            return False
        half = pipeline.losses(tensors, trees.take(at.y, [b, b]), 2).sum() / 2
        grads = torch.autograd.grad(half, [at.params[k] for k in row], allow_unused=True)
    want = {
        k: torch.zeros_like(at.params[k]) if g is None else g.to_dense()
        for k, g in zip(row, grads, strict=True)
    }
    return largest_error(row, want, pipeline.trace.rounds_to_half()) is None


def _message(name: str, error: float) -> str:
    what = f"the gradient of '{name}'" if name else "the loss"
    return (
        f"{what} differs from the definition on a test batch by a relative error of {error:.1e}, so the traced graph "
        f"does not compute what the model does (a cache, a hook, global state or data-dependent code?); {ANY_MODEL}"
    )
