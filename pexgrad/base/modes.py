"""The modes a call may find torch in, and how it works in each of them.

- `torch.no_grad()`: gradients are what was asked for, so a call switches them on for itself.
- `torch.inference_mode()`: autograd records nothing there, so a call leaves it, with copies of what was made in it.
- `torch.func` transforms: their tensors are wrapped, once for each level; here they are told apart and unwrapped.
- `torch.autograd.forward_ad`: autograd inside a call would lose the tangents, so such a call goes the same way.
- `torch.compile`: what is compiled, of a model or as a whole, is traced as the Python code that it was made of.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._higher_order_ops.cond import CondOp
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack

from . import trees
from .fakes import TRACING


def recording(differentiable: bool = True) -> AbstractContextManager[Any]:
    """Autograd on, or off, as usual, whatever mode the caller is in."""
    mode = torch.enable_grad() if differentiable else torch.no_grad()
    return _outside_inference(mode) if torch.is_inference_mode_enabled() else mode


@contextlib.contextmanager
def _outside_inference(mode: AbstractContextManager[Any]) -> Iterator[None]:
    with torch.inference_mode(False), mode:
        yield


def differentiable_kernels(wanted: bool) -> AbstractContextManager[Any]:
    """Attention by its formula where the result is to be differentiated again: fused kernels have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH) if wanted else contextlib.nullcontext()


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: str) -> Any:
    """Rules compute in the dtypes of what they are given."""
    if not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def users_modes() -> list[Any]:
    """The modes of torch's functions around a call that are neither torch's own nor ours.

    A mode of its operations sees those that a call makes, whenever it was traced.
    """
    around = _get_current_function_mode_stack()
    return [mode for mode in around if not type(mode).__module__.startswith(("torch.", "pexgrad."))]


_validates = ContextVar("_validates", default=False)


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """Without the checks of `torch.distributions`, which are on by default: they read numbers, and a trace has none."""
    token = _validates.set(torch.distributions.Distribution._validate_args)
    try:
        with mock.patch.object(torch.distributions.Distribution, "_validate_args", False):
            yield
    finally:
        _validates.reset(token)


def validated() -> AbstractContextManager[Any]:
    """Inside `unvalidated`, with these checks again, for code that has numbers."""
    return mock.patch.object(torch.distributions.Distribution, "_validate_args", _validates.get())


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Code that was given to `torch.compile` runs as it is written, where it is traced and where that is checked."""
    traced_through = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    branching = mock.patch.object(CondOp, "__call__", in_this_thread(_one_branch, CondOp.__call__))
    # the stance and the setting are the whole process's
    with TRACING, torch.compiler.set_stance("force_eager"), traced_through, branching:
        yield


def _one_branch(_: CondOp, pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    """`torch.cond` as the `if` that it stands for: not compiled, it has no gradient for parameters in its branches' closures.

    What it asks of a tensor is then read as Python code reads it.
    """
    return (true_fn if pred else false_fn)(*operands)


def in_this_thread(patched: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """The patched function where the trace runs, and the real one in all other threads."""
    here = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        return (patched if threading.get_ident() == here else real)(*args, **kwargs)

    return run


def recordable(tree: Any) -> Any:
    """`tree` with copies of the tensors that were made in inference mode, which autograd refuses."""
    if isinstance(tree, Tensor):
        return tree.clone() if _is_of_inference(tree) else tree
    if type(tree) is dict and all(isinstance(t, Tensor) and not _is_of_inference(t) for t in tree.values()):
        return tree  # what parameters nearly always are
    if not any(map(_is_of_inference, trees.tensors(tree))):
        return tree
    return trees.map_tensors(recordable, tree)


def _is_of_inference(t: Tensor) -> bool:
    # of a lazy one, which is refused by its name, nothing can be asked
    return not is_lazy(t) and t.is_inference()


# --- tensors inside torch.func transforms -----------------------------------------------------------


def inside_transform() -> bool:
    """Whether a `torch.func` transform is running."""
    return _functorch.peek_interpreter_stack() is not None


def is_wrapped(tree: Any) -> bool:
    """Whether a tensor in `tree` is wrapped by a `torch.func` transform."""
    return any(map(_functorch.is_functorch_wrapped_tensor, trees.tensors(tree)))


def is_differentiated(tree: Any) -> bool:
    """Whether `torch.func.grad`, a transform like it or forward-mode AD follows a tensor in `tree`, at any level."""
    wrapped = any(_functorch.is_gradtrackingtensor(t) for leaf in trees.tensors(tree) for t in _levels(leaf))
    return wrapped or has_tangent(tree)


def has_tangent(tree: Any) -> bool:
    """Whether a tensor in `tree` is a dual number of `torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in trees.tensors(tree))


def _levels(t: Tensor) -> Iterator[Tensor]:
    while _functorch.is_functorch_wrapped_tensor(t):
        yield t
        t = _functorch.get_unwrapped(t)


def unwrapped(t: Tensor) -> Tensor:
    """The tensor that `torch.func` transforms have wrapped, with all that they hide of it."""
    while _functorch.is_functorch_wrapped_tensor(t):
        t = _functorch.get_unwrapped(t)
    return t


def first_of(t: Tensor) -> Tensor:
    """The first of the values that a wrapped or dual tensor stands for; call it with no transform running."""
    dims = [_functorch.maybe_get_bdim(level) for level in _levels(t) if _functorch.is_batchedtensor(level)]
    t = unwrapped(t)
    for dim in reversed(dims):  # each counts the dimensions that the levels further in leave
        t = t.select(dim, 0)
    return t.detach()


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Run as if no `torch.func` transform were running; only tensors that are not wrapped may be used."""
    levels = []
    try:
        while inside_transform():
            levels.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while levels:
            _functorch.push_dynamic_layer_stack(levels.pop())
