"""The strategies of the paper that take any model: `naive`, the loop, and `multi`, one alias of the parameters per example.

Both follow the definition with the module's own code: row b is the gradient of loss(model(x_b), y_b).sum()
at a batch of one. The first example runs at copies of the parameters, and so do the others where it has written into these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import TraceError
from ..inputs.call import Call
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction, refuse_reading_parameters
from ..operator.jacobian import Jacobian


def _each(
    model: Bound, losses: LossFunction, at: Call, *, aliased: bool
) -> Iterator[tuple[Call, Call, Tensor]]:
    """Each example, what it runs at (the same, or copies of the parameters) and its loss."""
    writes = True
    for b in range(at.batch):
        one = at.examples(b, b + 1)
        one = one.at({k: p.view_as(p) for k, p in at.params.items()}) if aliased else one
        given = one.copied() if writes else one
        output = model.run(given.params, given.x)
        loss = losses.of_one(output, given.y)
        if not b:
            refuse_reading_parameters(loss, given)
            writes = model.writes_to_parameters() or _has_written(given, at)
        yield one, given, loss


def _has_written(given: Call, at: Call) -> bool:
    """Whether a run has changed the copies of the parameters that it was given."""
    return not all(torch.equal(given.params[k], p) for k, p in at.params.items())


def grad_or_zeros(loss: Tensor, leaves: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """The gradient with respect to each leaf, dense; zeros where the loss does not depend on it."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in leaves]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=create_graph)
    return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(leaves, grads, strict=True)]


def one_by_one(
    model: Bound, loss: LossFunction, at: Call, create_graph: bool = False
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The definition: the loss and the gradients of one example at a time; gradients must be enabled."""
    for _, given, value in _each(model, loss, at, aliased=False):
        row = grad_or_zeros(value, [given.params[k] for k in at.trainable], create_graph)
        _refuse_inner_backward(given)
        yield value if create_graph else value.detach(), dict(zip(at.trainable, row, strict=True))


def naive(model: Bound, loss: LossFunction, at: Call, create_graph: bool = False) -> Jacobian:
    """The loop over the examples."""
    with torch.enable_grad():
        losses, rows = zip(*one_by_one(model, loss, at, create_graph), strict=True)
    return _stacked(losses, [[*row.values()] for row in rows], at, create_graph)


def multi(model: Bound, loss: LossFunction, at: Call, create_graph: bool = False) -> Jacobian:
    """Every example with its own aliases of the parameters, views and not copies of most; one backward through the sum."""
    losses, aliases = [], []
    with torch.enable_grad():
        for mine, _, value in _each(model, loss, at, aliased=True):
            losses.append(value)
            aliases.append([mine.params[k] for k in at.trainable])
        flat = [a for mine in aliases for a in mine]
        grads = grad_or_zeros(torch.stack(losses).sum(), flat, create_graph)
    _refuse_inner_backward(at)
    n = len(at.trainable)
    rows = [grads[b * n : (b + 1) * n] for b in range(at.batch)]
    return _stacked([v if create_graph else v.detach() for v in losses], rows, at, create_graph)


def _refuse_inner_backward(at: Call) -> None:
    """Raise where a backward inside the model's own, as reversible layers run one, has put gradients where nobody looks."""
    found = [k for k in at.trainable if at.params[k].is_leaf and at.params[k].grad is not None]
    if found:
        raise TraceError(
            f"the model calls .backward() in its own forward or backward, which gives '{found[0]}' a gradient past the one that "
            "is asked for; use torch.autograd.grad there, and return the gradients"
        )


def _stacked(
    losses: Sequence[Tensor], rows: Sequence[list[Tensor]], at: Call, create_graph: bool
) -> Jacobian:
    columns = zip(*rows, strict=True)
    by_name = {k: torch.stack(c) for k, c in zip(at.trainable, columns, strict=True)}
    return Jacobian.of_rows(torch.stack([*losses]), by_name, create_graph)


LOOPS: dict[str, Callable[..., Jacobian]] = {"naive": naive, "multi": multi}
