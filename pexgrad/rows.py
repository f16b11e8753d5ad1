"""Small pure functions of rows, the dicts `{name: (B, *shape)}`, flat or nested, that the transforms return.

    flatten, unflatten    to (B, P) and back
    norms, dot            |g_b|, <g_b, v>
    clip, mean            g_b / max(1, |g_b| / C), the average over the batch
    to_module_grads       into `.grad`, for an optimiser

Where only a norm, a product or a sum is needed, the transforms give it without building rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from .base import nested
from .base.checks import positive, shaped
from .base.numerics import accumulable, dots, flat, real, squared_norms, sum_of, weighted
from .errors import InputError
from .operator.clipping import bounded

Rows = Mapping[str, Tensor]


def flatten(rows: Rows, *, batch_dims: int = 1) -> Tensor:
    """(B, P) from rows `{name: (B, *shape)}`, in the order of the names; one copy, none for a single entry.

    >>> flatten(grads).shape
    torch.Size([5, 8])

    Args:
        rows: tensors with `batch_dims` common leading dimensions.
        batch_dims: 1 for rows, 0 for parameters and gradients, 2 for an ensemble's rows.

    Raises:
        InputError: where there are no entries or their leading dimensions differ.
    """
    rows = nested.flatten(rows)
    if not rows:
        raise InputError("there are no rows to flatten")
    if len({r.shape[:batch_dims] for r in rows.values()}) > 1 or any(
        r.dim() < batch_dims for r in rows.values()
    ):
        shapes = ", ".join(f"'{k}' {tuple(r.shape)}" for k, r in rows.items())
        raise InputError(f"the first {batch_dims} dimensions of the entries differ: {shapes}")
    parts = [r.reshape(*r.shape[:batch_dims], prod(r.shape[batch_dims:])) for r in rows.values()]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def unflatten(flat: Tensor, params: Rows) -> dict[str, Tensor]:
    """{name: (..., *shape)} from (..., P): the inverse of `flatten`, views without a copy.

    >>> unflatten(flatten(grads), params)["weight"].shape
    torch.Size([5, 2, 3])

    Args:
        flat: (..., P).
        params: name -> (*shape), for the names and shapes; P is their number of elements.

    Raises:
        InputError: where P does not fit.
    """
    shapes = {k: p.shape for k, p in nested.flatten(params).items()}
    sizes = {k: shape.numel() for k, shape in shapes.items()}
    if not flat.dim() or flat.shape[-1] != sum(sizes.values()):
        raise InputError(
            f"flat is {tuple(flat.shape)}; expected (..., {sum(sizes.values())}) for these parameters"
        )
    found, start = {}, 0
    for k, n in sizes.items():
        found[k] = flat.narrow(-1, start, n).unflatten(-1, shapes[k]) if shapes[k] else flat[..., start]
        start += n
    return nested.like(params, found)


def norms(rows: Rows, *, per_param: bool = False) -> Tensor | dict[str, Tensor]:
    """(B,): the norm of each example's gradient; with `per_param`, `{name: (B,)}`. Half precision gives float32.

    >>> norms(grads).shape
    torch.Size([5])

    Raises:
        InputError: where there are no rows to take one norm of.
    """
    squares = {k: squared_norms(r) for k, r in nested.flatten(rows).items()}
    if per_param:
        return nested.like(rows, {k: s.sqrt() for k, s in squares.items()})
    return _total(squares).sqrt()


def dot(rows: Rows, other: Rows) -> Tensor:
    """(B,): the inner product of each row with a direction `{name: (*shape)}`, or with the same example's row of `other`.

    >>> dot(grads, params).shape, dot(grads, grads).shape
    (torch.Size([5]), torch.Size([5]))

    Raises:
        InputError: where names or shapes do not fit, or there are no rows.
    """
    parts, other = {}, nested.flatten(other)
    for k, r in nested.flatten(rows).items():
        v = other.get(k)
        if v is None or v.shape not in (r.shape, r.shape[1:]):
            got = "nothing" if v is None else tuple(v.shape)
            raise InputError(f"'{k}' has rows {tuple(r.shape)}, but {got} to multiply them with")
        if v.dim() == r.dim():
            parts[k] = dots(r, v)
        else:
            parts[k] = real(accumulable(flat(r)) @ accumulable(v.reshape(-1)).conj())
    return _total(parts)


def clip(rows: Rows, max_norm: float) -> dict[str, Tensor]:
    """Each row scaled down to a norm of at most `max_norm`: g_b / max(1, |g_b| / C).

    >>> norms(clip(grads, 1.0)).max() <= 1.0
    tensor(True)

    Raises:
        InputError: where `max_norm` is not a positive, finite number.
    """
    max_norm = positive(max_norm, "max_norm")
    own = norms(rows)
    assert isinstance(own, Tensor)
    weights = bounded(own, max_norm)
    return nested.like(rows, {k: weighted(r, weights) for k, r in nested.flatten(rows).items()})


def mean(rows: Rows, weights: Tensor | None = None) -> dict[str, Tensor]:
    """{name: (*shape)}: the average of the rows, sum_b w_b g_b / B with weights (B,).

    >>> mean(grads)["weight"].shape
    torch.Size([2, 3])

    Raises:
        InputError: where there is not one weight for each example.
    """
    flat = nested.flatten(rows)
    for k, r in flat.items() if weights is not None else ():
        shaped(weights, r.shape[:1], f"weights for the rows of '{k}'", "one for each example")
    return nested.like(rows, {k: _mean(r, weights).to(r.dtype) for k, r in flat.items()})


def _mean(r: Tensor, weights: Tensor | None) -> Tensor:
    wide = accumulable(r)  # a sum of half precision may overflow where the mean does not
    total = wide.sum(0) if weights is None else torch.tensordot(weights.to(wide.dtype), wide, 1)
    return total / max(1, r.shape[0])


def to_module_grads(model: nn.Module, grads: Rows, *, accumulate: bool = False) -> None:
    """Put gradients `{name: (*shape)}` into the parameters' `.grad`, so that an optimiser can take its step.

    >>> to_module_grads(model, clipped_grad(model, max_norm=1.0)(params, x, y).grads)
    >>> optimiser.step()

    Args:
        model: whose `.grad` are set; beside `out=`, the only thing in the library that a function changes.
        grads: by the names of `model.named_parameters()`; parameters left out keep their `.grad`.
        accumulate: add to a `.grad` that is there, instead of replacing it.

    Raises:
        InputError: where a name or a shape is not the model's; nothing is changed then.
    """
    own, grads = dict(model.named_parameters()), nested.flatten(grads)
    for k, g in grads.items():
        if k not in own or own[k].shape != g.shape:
            has = f"'{k}' {tuple(own[k].shape)}" if k in own else f"no parameter '{k}'"
            raise InputError(f"grads[{k!r}] is {tuple(g.shape)}, but the model has {has}")
    for k, g in grads.items():
        g, before = g.detach().to(own[k].dtype), own[k].grad
        own[k].grad = g.clone() if before is None or not accumulate else before + g


def _total(parts: Mapping[str, Tensor]) -> Tensor:
    if not parts:
        raise InputError("there are no rows: the dict is empty")
    return sum_of(list(parts.values()))
