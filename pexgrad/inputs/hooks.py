"""Hooks of modules: those that a model's modules hold, and those that are registered for every module there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import TraceError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOW = ("with_kwargs", "always_called")  # ways in which a hook may be called


def hooks_in(module: nn.Module) -> list[Any]:
    """A module's hooks, of all kinds."""
    return [hook for kind in HOOKS for hook in (vars(module).get(kind) or {}).values()]


def hooks_of(held: dict[str, Any], hooks: str) -> Iterator[tuple[str, Any]]:
    """A module's hooks of one kind, each with how it is called."""
    for key, hook in held[hooks].items():
        yield "", hook
        for how in HOW:
            yield how, key in held.get(f"{hooks}_{how}", ())


def global_hooks() -> list[tuple[Any, ...]]:
    """The hooks that are registered for every module there is, each with its kind and with how it is called."""
    module, found = torch.nn.modules.module, []
    if not module._has_any_global_hook():
        return found
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        held = getattr(module, f"_global_{kind}_hooks")
        ways = [getattr(module, f"_global_{kind}_hooks_{how}", ()) for how in HOW]
        found += [(kind, hook, *(key in way for way in ways)) for key, hook in held.items()]
    return found


def refuse_backward_hooks(model: nn.Module | Callable[..., Any]) -> None:
    """Raise where a module has hooks that autograd would run on its way back."""
    if not isinstance(model, nn.Module):
        return
    for path, m in model.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise TraceError(
                f"{type(m).__name__} at '{path}' has a backward hook, which may change gradients and which a "
                "pure function cannot run; remove it for this call"
            )
    if torch.nn.modules.module._global_backward_hooks or torch.nn.modules.module._global_backward_pre_hooks:
        raise TraceError("a global module backward hook is registered; remove it for this call")
