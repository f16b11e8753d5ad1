"""The signature of a call: what a trace depends on, so that calls of one signature share theirs at any batch size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base import trees
from ..base.modes import autocast_dtype, users_modes
from ..inputs.call import Call
from ..inputs.contents import ATOMS, exact
from ..inputs.hooks import global_hooks
from ..inputs.walk import held_by


def signature(call: Call) -> Any:
    """Equal for calls of one kind; what the module holds and reads comes first. Objects are told apart by identity."""
    leaves, spec = trees.flatten(trees.as_call(call.x))
    y_leaves, y_spec = trees.flatten(call.y)
    return (
        call.module.fingerprint(),
        tuple((k, p.shape, p.dtype, p.device, p.stride()) for k, p in call.params.items()),
        tuple((k, b.shape, b.dtype, b.device, _strides(b)) for k, b in call.module.buffers.items()),
        tuple(call.trainable),
        spec, tuple(map(_describe, leaves)), y_spec, tuple(map(_describe, y_leaves)),
        tuple(map(autocast_dtype, sorted({"cpu", *(p.device.type for p in call.params.values())}))),
        torch.get_default_dtype(), torch.get_default_device(),
        tuple(tuple(map(id, held_by(v))) for v in _around()),
    )  # fmt: skip


def identified(call: Call) -> list[Any]:
    """The objects that a signature knows by identity, to be kept alive with it: otherwise a new one might have the same."""
    leaves = trees.flatten((trees.as_call(call.x), call.y))[0]
    beside = [v for v in leaves if not _is_plain(v)]
    return [*call.module.references, *(held for v in (*beside, *_around()) for held in held_by(v))]


def _around() -> list[Any]:
    """What of the user's runs around the model: hooks for all modules, and modes, known by their class and their attributes."""
    return [*global_hooks(), *((type(mode), vars(mode)) for mode in users_modes())]


def _strides(t: Tensor) -> tuple[int, ...] | None:
    return t.stride() if t.layout is torch.strided else None


def _is_plain(v: Any) -> bool:
    """Whether a leaf of the inputs is a tensor or a value that cannot change, which is all that there is of it."""
    return isinstance(v, Tensor) or type(v) in ATOMS


def _describe(v: Any) -> Any:
    """What a trace depends on in an input leaf: everything of a tensor but its batch size, all that any other value holds."""
    if isinstance(v, Tensor):
        return v.shape[1:], v.dtype, v.device, v.stride()[1:], v.requires_grad
    if _is_plain(v):
        return exact(v)
    numbers = v.tobytes() if hasattr(v, "tobytes") else None  # of an array, which may change in place
    return tuple(map(id, held_by(v))), numbers
