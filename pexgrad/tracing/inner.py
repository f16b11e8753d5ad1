"""Derivatives and vmaps inside a model's own forward: forces from an energy, residuals of differential equations, scores.

What autograd and `torch.func` compute there can only be recorded below them, where `detach` and `no_grad` leave no trace. So
wherever a value requires no gradient in the model's own run, a `detach` is put into the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree

from ..base import trees
from ..base.modes import in_this_thread, inside_transform, outside_transforms, unwrapped
from ..base.numerics import is_inexact
from ..base.source import calling_line
from ..errors import ANY_MODEL, TraceError

aten = torch.ops.aten

# what a message says of derivatives that have no graph
ON_DERIVATIVES = (
    "in a model's own forward, gradients of gradients (torch.autograd.grad, torch.func.grad, vjp) and torch.vmap mostly have a "
    "graph for every batch size, forward-mode derivatives (jvp, jacfwd, hessian) and Jacobians of Jacobians have none"
)


@contextlib.contextmanager
def cutting() -> Iterator[None]:
    """Record as detached what the code detaches, and all that it computes while gradients are off."""
    linear, hooks, detach = F.linear, saved_tensors_hooks, _cutting_off(Tensor.detach)

    def mapped_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if get_proxy_mode() is None or not inside_transform():
            return linear(x, weight, bias)
        y = x @ weight.mT  # vmap's own form asks for sizes in numbers
        return y if bias is None else y + bias

    with (
        mock.patch.object(Tensor, "detach", detach),
        mock.patch.object(torch, "detach", detach),
        mock.patch.object(Tensor, "detach_", _cutting_off(Tensor.detach_)),
        mock.patch.object(F, "linear", mapped_linear),
        # hooks of a checkpoint, say, would detach what a backward needs
        mock.patch.multiple(
            hooks,
            __enter__=in_this_thread(_nothing, hooks.__enter__),
            __exit__=in_this_thread(_nothing, hooks.__exit__),
        ),
        mock.patch.object(proxy_tensor, "proxy_call", _cutting(proxy_tensor.proxy_call)),
    ):
        yield


def _cutting_off(detach: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A way to detach that the graph is told of."""

    def detached(self: Tensor) -> Tensor:
        out, mode = detach(self), get_proxy_mode()
        if mode is not None:
            _cut(unwrapped(out), mode.tracer)
        return out

    return detached


def _nothing(*_: Any) -> None:
    pass


def _cutting(call: Callable[..., Any]) -> Callable[..., Any]:
    def calling(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return call(mode, func, pre_dispatch, args, kwargs)
        if any(t.requires_grad for t in trees.tensors(_written(func, args))):
            raise TraceError(
                f"{func} (at {calling_line()}) changes a value in place while gradients are off, and the value has one; in a "
                f"model that takes derivatives in its own forward let it change a copy, or {ANY_MODEL}"
            )
        out = call(mode, func, pre_dispatch, args, kwargs)
        for t in trees.tensors(out):
            _cut(t, mode.tracer)
        return out

    return calling


def _written(func: Any, args: Sequence[Any]) -> list[Any]:
    """The operands that an operation changes in place."""
    declared = func._schema.arguments if isinstance(func, OpOverload) else ()
    return [
        v for v, s in zip(args, declared, strict=False) if s.alias_info is not None and s.alias_info.is_write
    ]


def _cut(t: Tensor, tracer: Any) -> None:
    slot = get_proxy_slot(t, tracer, None) if is_inexact(t) else None
    if slot is None or t.requires_grad:
        return
    cut = tracer.create_proxy("call_function", aten.detach.default, (slot.proxy,), {})
    with outside_transforms():
        track_tensor_tree(t, cut, constant=None, tracer=tracer)
