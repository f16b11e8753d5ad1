"""How a transform composes with what is around a call: modes, threads, nested parameters, other transforms.

The transform itself works on flat dicts of ordinary tensors with autograd on. `composable` brings every call to
that, or to the flat graph of the transform (see `lower.py`) where its tensors belong to `torch.func` or `torch.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base import modes, nested, trees
from ..errors import InputError
from ..inputs.arguments import Params, check_call
from ..inputs.call import Call
from ..inputs.walk import snapshot
from . import compiled

if TYPE_CHECKING:
    from .transform import Transform


def composable(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a transform's call: it may then come from anywhere."""

    @functools.wraps(call)
    def composed(self: Transform, params: Params, x: Any, y: Any = None, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _call_compiled(self, composed, params, x, y, options)
        if nested.is_nested(params):
            flat, named, whole = self._by_name(params)
            options = {k: nested.flatten(v) if nested.is_nested(v) else v for k, v in options.items()}
            return whole(composed(flat, named, x, y, **options))
        arguments = as_dict(params), x, y
        given, inside = (*arguments, options), modes.inside_transform()
        if inside:
            _refuse_wrapped_reads(self, arguments[0])
        if modes.has_tangent(given) or (inside and modes.is_wrapped(given)):
            return _through_graph(self, call, params, x, y, options)
        with modes.outside_transforms(), modes.recording():
            return call(self, *map(modes.recordable, arguments), **options)

    return composed


def _call_compiled(
    transform: Transform, call: Callable[..., Any], params: Params, x: Any, y: Any, options: dict[str, Any]
) -> Any:
    # what cannot be one operation of a compiled graph runs as it does elsewhere, between two graphs
    as_operation = transform._parts() and not transform._options.create_graph and "out" not in options
    params = as_dict(params)
    if as_operation and compiled.takes((params, x, y, options)):
        return compiled.call(transform, params, x, y, options)
    return _uncompiled(call, transform, params, x, y, options)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable
def _uncompiled(
    call: Callable[..., Any], transform: Transform, params: Params, x: Any, y: Any, options: dict[str, Any]
) -> Any:
    return call(transform, params, x, y, **options)


def _refuse_wrapped_reads(transform: Transform, params: Any) -> None:
    """Raise where a `torch.func` transform wraps what is no argument of the call: it would be taken for a constant."""
    given = params if isinstance(params, dict) else {}
    for what, function, passed in (
        ("model", transform._model.model, given),
        ("loss", transform._loss.loss, {}),
    ):
        held = snapshot(function)
        for name, t in (held.parameters | held.buffers).items():
            if name not in passed and modes.is_wrapped(t):
                raise InputError(_wrapped(f"the {what}'s '{name}'"))
        if modes.is_wrapped(list(held.loose.values())):
            raise InputError(
                _wrapped(f"a tensor that the {what} finds beside its arguments (in a closure, a global)")
            )


def _through_graph(
    transform: Transform, method: Callable[..., Any], params: Params, x: Any, y: Any, options: dict[str, Any]
) -> Any:
    """A call with tensors of a `torch.func` transform or dual ones, with no autograd inside: through the flat graph."""
    _refuse_what_graphs_lack(transform, method.__name__, (params, x, y), options)
    call = check_call(transform._model, params, x, y)
    further = ()
    if (mask := options.get("mask")) is not None:
        transform._check_mask(call, mask)
        x, y = (_counted(tree, call, mask) for tree in (x, y))
        further = (mask,)
    with modes.outside_transforms(), modes.recording():
        arguments = (trees.map_tensors(modes.first_of, t) for t in (dict(params), x, y))
        lowered = transform._graph(check_call(transform._model, *arguments), *map(modes.first_of, further))
    values = [*replace(call, x=x, y=y).flat(), *further]
    with modes.without_autocast(values[0].device.type):
        return lowered.run(values)


def _refuse_what_graphs_lack(
    transform: Transform, method: str, given: tuple[Any, Any, Any], options: dict[str, Any]
) -> None:
    name = type(transform).__name__
    if method != "__call__":
        raise InputError(f"{method} takes plain tensors, not those of a torch.func transform or dual ones")
    lacking = [k for k, v in options.items() if v is not None and k != "mask"]
    if lacking:
        raise InputError(
            f"{name} takes no {', '.join(lacking)}= inside a torch.func transform or forward-mode AD"
        )
    if modes.is_differentiated(given) and not transform._options.create_graph:
        raise InputError(
            f"differentiating {name} in forward mode or with torch.func takes {name} with create_graph=True"
        )


def _wrapped(what: str) -> str:
    return (
        f"inside a torch.func transform {what} belongs to that transform, and the call would take it for a constant; pass it "
        "in params, x or y"
    )


def _counted(tree: Any, call: Call, mask: Tensor) -> Any:
    """The examples with those that a mask does not count replaced by the first that it counts: padding may hold anything."""
    index = torch.where(mask, torch.arange(call.batch, device=mask.device), mask.int().argmax())
    return trees.map_tensors(lambda t: t[index], tree) if call.batch else tree


def as_dict(params: Any) -> Any:
    """A mapping as a plain dict; anything else is refused elsewhere."""
    return dict(params) if isinstance(params, Mapping) else params
