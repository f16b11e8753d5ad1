"""What transforms return: the parts of a result, and how results of pieces of a batch are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..base import nested
from ..base.checks import described
from ..errors import InputError
from ..inputs.call import example_numbers
from ..operator.jacobian import Jacobian


@dataclass(frozen=True)
class Clipped:
    """The result of `clipped_grad`.

    Attributes:
        grads: name -> (*shape), the sum over the batch of weighted per-example gradients.
        norms: (B,), over all parameters and before clipping, in units of the gradient; zero for examples that a mask leaves out.
        losses: (B,), likewise.
    """

    grads: dict[str, Tensor]
    norms: Tensor
    losses: Tensor


# so that torch.func, torch.compile and torch.export take it as a result
pytree.register_pytree_node(
    Clipped,
    lambda c: ([c.grads, c.norms, c.losses], None),
    lambda leaves, _: Clipped(*leaves),
    serialized_type_name="pexgrad.Clipped",
    flatten_with_keys_fn=lambda c: ([(pytree.GetAttrKey(k), v) for k, v in vars(c).items()], None),  # pyright: ignore[reportArgumentType]
)


class Part(NamedTuple):
    """A part of a transform's result: a tensor for each parameter that is differentiated, by name, or one for all of them."""

    by_name: bool
    # the parameters, B and a device -> empty tensors of its shapes and dtypes
    outline: Callable[[list[Tensor], Any, Any], list[Tensor]]


# {name: (B, *shape)}, {name: (*shape)}, {name: (B,)} and (B,)
ROWS = Part(True, lambda ps, b, device: [p.new_empty((b, *p.shape), device=device) for p in ps])
SUMS = Part(True, lambda ps, b, device: [p.new_empty(p.shape, device=device) for p in ps])
NUMBERS_BY_NAME = Part(True, lambda ps, b, device: [example_numbers([p], b, device) for p in ps])
NUMBERS = Part(False, lambda ps, b, device: [example_numbers(ps, b, device)])


def split(flat: list[Tensor], parts: Iterable[Part], paths: nested.Structure) -> list[Any]:
    """The parts from the tensors of all of them in a row; what is by name is nested by these paths."""
    found, start = [], 0
    for part in parts:
        stop = start + (len(paths) if part.by_name else 1)
        found.append(nested.at(paths, flat[start:stop]) if part.by_name else flat[start])
        start = stop
    return found


def join(parts: Iterable[Any]) -> Any:
    """The result of a batch from those of its parts, at least one: rows one after the other, clipped sums added up."""
    total: dict[str, Any] | None = None
    found = []
    for part in parts:
        if isinstance(part, Clipped):  # of the sums no more than one is kept
            total = part.grads if total is None else pytree.tree_map(torch.add, total, part.grads)
            part = Clipped({}, part.norms, part.losses)
        found.append(part)
    if len(found) > 1:
        check_joinable(found, 1)
        found = [pytree.tree_map(lambda *tensors: torch.cat(tensors), *found)]
    (result,) = found
    return result if total is None else Clipped(total, result.norms, result.losses)


def check_joinable(parts: list[Any], dims: int) -> None:
    """Raise where results are not tensors of at least so many dimensions, in trees."""
    for leaf in pytree.tree_leaves(parts[0]):
        if not isinstance(leaf, Tensor) or leaf.dim() < dims:
            what = described(leaf) + (" without dimensions" if isinstance(leaf, Tensor) else "")
            raise InputError(
                f"the function gives {what}, which cannot be put together; let it give tensors, with the examples on "
                "dimension 0 where there are several batches"
            )


def nest(result: Any, paths: nested.Structure) -> Any:
    """A transform's result with what is by name in it nested as the parameters were."""
    if isinstance(result, Jacobian):
        return replace(result, paths=paths)
    if isinstance(result, Clipped):
        return replace(result, grads=nested.nest(result.grads, paths))
    if isinstance(result, dict):
        return nested.nest(result, paths)
    return tuple(nest(part, paths) for part in result) if isinstance(result, tuple) else result
