"""How a transform composes with what is around a call: modes, threads, nested parameters, other transforms.

The transform itself works on flat dicts of ordinary tensors with autograd on. `composable` brings every call to
that, or to the flat graph of the transform (see `lower.py`) where its tensors belong to `torch.func` or `torch.compile`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..base import modes, nested, trees
from ..base.fakes import TRACING
from ..errors import InputError, TraceError
from ..flat.lower import Lowered
from ..flat.lowered_module import with_arguments
from ..inputs.arguments import Options, Params, check_call
from ..inputs.call import Call
from ..inputs.rebind import Bound
from ..inputs.snapshot import snapshot
from ..operator.jacobian import Jacobian
from . import compiled
from .graphs import Graphs
from .pickling import Pickled
from .results import Part, nest
from .traces import Traces

if TYPE_CHECKING:
    from typing_extensions import Self


def composable(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a transform's call: it may then come from anywhere."""

    @functools.wraps(call)
    def composed(self: Composable, params: Params, x: Any, y: Any = None, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _call_compiled(self, composed, params, x, y, options)
        if nested.is_nested(params):
            flat, named, whole = self._by_name(params)
            options = {k: nested.flatten(v) if nested.is_nested(v) else v for k, v in options.items()}
            return whole(composed(flat, named, x, y, **options))
        arguments = _as_dict(params), x, y
        given, inside = (*arguments, options), modes.inside_transform()
        if inside:
            self._refuse_wrapped_reads(arguments[0])
        if modes.has_tangent(given) or (inside and modes.is_wrapped(given)):
            return self._through_graph(call, params, x, y, options)
        with modes.outside_transforms(), modes.recording():
            return call(self, *map(modes.recordable, arguments), **options)

    return composed


def _call_compiled(
    transform: Composable, call: Callable[..., Any], params: Params, x: Any, y: Any, options: dict[str, Any]
) -> Any:
    # what cannot be one operation of a compiled graph runs as it does elsewhere, between two graphs
    as_operation = transform._parts() and not transform._options.create_graph and "out" not in options
    params = _as_dict(params)
    if as_operation and compiled.takes((params, x, y, options)):
        return compiled.call(transform, params, x, y, options)
    return _uncompiled(call, transform, params, x, y, options)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable
def _uncompiled(
    call: Callable[..., Any], transform: Composable, params: Params, x: Any, y: Any, options: dict[str, Any]
) -> Any:
    return call(transform, params, x, y, **options)


def _wrapped(what: str) -> str:
    return (
        f"inside a torch.func transform {what} belongs to that transform, and the call would take it for a constant; pass it "
        "in params, x or y"
    )


def _counted(tree: Any, call: Call, mask: Tensor) -> Any:
    """The examples with those that a mask does not count replaced by the first that it counts: padding may hold anything."""
    index = torch.where(mask, torch.arange(call.batch, device=mask.device), mask.int().argmax())
    return trees.map_tensors(lambda t: t[index], tree) if call.batch else tree


def _as_dict(params: Any) -> Any:
    return dict(params) if isinstance(params, Mapping) else params


class Composable(Pickled):
    """The part of a transform that is about what is around it."""

    _options: Options
    __call__: Callable[..., Any]

    def _reset(self) -> None:
        """Begin without anything that was traced."""
        self._traces = Traces(
            self._model, self._loss, verified=self._options.verify, owner=type(self).__name__
        )
        self._graphs = Graphs(self._written_in())
        self._by_structure: dict[nested.Structure, Self] = {}
        self._handle = compiled.handle(self)

    def _answer(self, jacobian: Jacobian, *further: Tensor) -> Any:
        """What the transform returns, from the Jacobian of the whole batch and a mask (B,) if it takes one."""
        raise NotImplementedError

    def _check_mask(self, call: Call, mask: Tensor) -> None:
        """Raise where a mask cannot be part of the flat graph."""
        call.check_mask(mask)

    def _parts(self) -> tuple[Part, ...]:
        """What the result is made of, which compiled code has to know before there is one; nothing, where it is an operator."""
        return ()

    def _of_parts(self, *parts: Any) -> Any:
        """The result that is made of these."""
        return parts[0] if len(parts) == 1 else parts

    def _flat(self, paths: nested.Structure) -> Self:
        """The same transform of the flat dict of parameters."""
        if self._model.is_module:
            return self
        with TRACING:
            if paths not in self._by_structure:
                other = self._by_structure[paths] = copy.copy(self)
                other._model = Bound(nested.taking_flat(self._model.model, paths))
                other._reset()
            return self._by_structure[paths]

    def _by_name(self, params: Params) -> tuple[Self, Params, Callable[[Any], Any]]:
        """The transform of a flat dict, that dict, and what makes of a result one that is nested as the parameters are."""
        if not nested.is_nested(params):
            return self, params, lambda result: result
        paths = nested.structure(params)
        return self._flat(paths), nested.flatten(params), functools.partial(nest, paths=paths)

    # --- the flat graph ---------------------------------------------------------------------------

    def lower(self, params: Params, x: Any, y: Any = None) -> fx.GraphModule:
        """The call as one flat, functional graph of ATen operations: forward, cotangents and rules, no autograd inside.

        >>> graph = per_example_grad(model).lower(params, x, y)
        >>> graph.print_readable()
        >>> graph(params, x, y)["weight"].shape
        torch.Size([5, 2, 3])

        It runs as it is under `torch.func.vmap`, over parameters, data or both, under `torch.compile` and `torch.export`.

        Args:
            params: as for the function; names left out become buffers of the graph module, shared with the model.
            x: inputs (B, ...) of the kind that the graph is for; every batch size is served where the loss and the rules
                work on whole batches, which `graph.meta["batch"]` tells: `"any"`, `"2 or more"`, or the one size. The graph
                refuses any other size; lower again for that one (as the function itself does under `torch.func.vmap`).
            y: targets, likewise.

        Returns:
            A module called like the function, `graph(params, x, y)`, with None for a `y` that there is not.
            Dtypes under autocast are written into it, so run it outside autocast. `chunk_size` and `out` have no part in it.

        Raises:
            PexgradError: where the function itself would refuse, and where the call has no flat graph.
        """
        transform, named, whole = self._by_name(params)
        with modes.outside_transforms(), modes.recording():
            call = check_call(transform._model, *map(modes.recordable, (_as_dict(named), x, y)))
            return with_arguments(transform._graph(call), call, (params, x, y), whole)

    def _graph(self, call: Call, *further: Tensor) -> Lowered:
        """The flat graph that serves a call, from the cache if it is there."""
        if not self._parts():
            raise InputError(
                f"{type(self).__name__} returns an operator, which has no flat graph; use a transform of tensors"
            )
        if self._options.strategy != "crb":
            raise TraceError(
                f'strategy={self._options.strategy!r} has no flat graph: it runs the model itself; use "crb"'
            )
        return self._graphs.of(self._traces.of(call), call, self._options, self._answer, further)

    def _written_in(self) -> list[Callable[..., Any]]:
        """The user's functions that a recorded graph has written into it."""
        return [self._loss.loss]

    def _refuse_wrapped_reads(self, params: Any) -> None:
        """Raise where a `torch.func` transform wraps what is no argument of the call: it would be taken for a constant."""
        given = params if isinstance(params, dict) else {}
        for what, function, passed in (("model", self._model.model, given), ("loss", self._loss.loss, {})):
            held = snapshot(function)
            for name, t in (held.parameters | held.buffers).items():
                if name not in passed and modes.is_wrapped(t):
                    raise InputError(_wrapped(f"the {what}'s '{name}'"))
            if modes.is_wrapped(list(held.loose.values())):
                raise InputError(
                    _wrapped(f"a tensor that the {what} finds beside its arguments (in a closure, a global)")
                )

    def _through_graph(
        self, method: Callable[..., Any], params: Params, x: Any, y: Any, options: dict[str, Any]
    ) -> Any:
        """A call with tensors of a `torch.func` transform or dual ones, with no autograd inside: through the flat graph."""
        name = type(self).__name__
        if method.__name__ != "__call__":
            raise InputError(
                f"{method.__name__} takes plain tensors, not those of a torch.func transform or dual ones"
            )
        mask = options.get("mask")
        given = [k for k, v in options.items() if v is not None and k != "mask"]
        if given:
            raise InputError(
                f"{name} takes no {', '.join(given)}= inside a torch.func transform or forward-mode AD"
            )
        if modes.is_differentiated((params, x, y)) and not self._options.create_graph:
            raise InputError(
                f"differentiating {name} in forward mode or with torch.func takes {name} with create_graph=True"
            )
        call = check_call(self._model, params, x, y)
        further = ()
        if mask is not None:
            self._check_mask(call, mask)
            x, y = (_counted(tree, call, mask) for tree in (x, y))
            further = (mask,)
        with modes.outside_transforms(), modes.recording():
            arguments = (trees.map_tensors(modes.first_of, t) for t in (dict(params), x, y))
            lowered = self._graph(check_call(self._model, *arguments), *map(modes.first_of, further))
        values = [*replace(call, x=x, y=y).flat(), *further]
        with modes.without_autocast(values[0].device.type):
            return lowered.run(values)
