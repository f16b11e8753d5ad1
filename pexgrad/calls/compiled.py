"""A transform's call inside a function that `torch.compile` compiles: one operation of the compiled graph.

Autograd with respect to values in the middle of a graph is more than the compiler takes, so it sees a call as a single opaque
operation, `torch.ops.pexgrad.call`, with flat lists of tensors in and out; when the compiled code runs, the operation makes the
call. It breaks no graph, and works at `fullgraph=True`. To have the compiler fuse what is inside, compile
the flat graph: `torch.compile(fn.lower(params, x, y))`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..base import nested, trees
from ..base.modes import autocast_dtype
from ..errors import InputError
from .results import split

if TYPE_CHECKING:
    from .transform import Transform

_known: weakref.WeakValueDictionary[str, Transform] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle(transform: Transform) -> str:
    """A name for a transform, by which the operation finds it again."""
    name = str(next(_numbers))
    _known[name] = transform
    return name


def call(transform: Transform, params: Any, x: Any, y: Any, options: dict[str, Any]) -> Any:
    """What `transform(params, x, y)` returns, in operations that the compiler can trace."""
    tensors: list[Tensor] = []
    template = _template((params, x, y, options, _state(transform, params)), tensors)
    dtype = autocast_dtype(tensors[0].device.type)
    cast = "" if dtype is None else str(dtype).removeprefix("torch.")
    flat = torch.ops.pexgrad.call(tensors, transform._handle, template, cast)
    return transform._of_parts(*split(flat, transform._parts(), _paths(transform._handle, template)))


def _state(transform: Transform, params: Any) -> list[Tensor]:
    """What the modules hold beside the parameters that a call is given: the compiler has to know that the call reads it."""
    model, loss, given = transform._model, transform._loss.loss, nested.flatten(params)
    held = [p for k, p in model.parameters().items() if k not in given] + list(model.buffers().values())
    return held + ([*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else [])


def _refuse_changed(given: list[Tensor], own: list[Tensor]) -> None:
    """Raise where compiled code has another value for what a module holds: it writes its changes back at its end."""
    for t, kept in zip(given, own, strict=True):
        if t.data_ptr() != kept.data_ptr() and not torch.equal(t, kept):
            raise InputError(
                f"a buffer, or a parameter that is not in params, of shape {tuple(kept.shape)} is changed in the same compiled "
                "function that calls this one, and is written back only at its end; change it outside of the compiled function, "
                "or pass it in params"
            )


def takes(tree: Any) -> bool:
    """Whether `tree` is of tensors, and of plain values that a literal can be written of, in plain containers."""
    if isinstance(tree, Tensor):
        return True
    if type(tree) in (dict, OrderedDict):
        return all(type(k) in (str, int) for k in tree) and all(map(takes, tree.values()))
    if type(tree) in (tuple, list):
        return all(map(takes, tree))
    if type(tree) is float:
        return math.isfinite(tree)
    return tree is None or type(tree) in (bool, int, str)


def _template(tree: Any, tensors: list[Tensor]) -> str:
    """`tree` as a literal in which bytes, the tensors' places in `tensors`, stand for the tensors."""
    if isinstance(tree, Tensor):
        tensors.append(tree.detach())
        return f"b'{len(tensors) - 1}'"
    if type(tree) in (dict, OrderedDict):
        return "{" + "".join([f"{k!r}: {_template(v, tensors)}, " for k, v in tree.items()]) + "}"
    if type(tree) is tuple:
        return "(" + "".join([_template(v, tensors) + ", " for v in tree]) + ")"
    if type(tree) is list:
        return "[" + "".join([_template(v, tensors) + ", " for v in tree]) + "]"
    return repr(tree)


def _filled(template: str, tensors: list[Tensor]) -> Any:
    return pytree.tree_map(
        lambda v: tensors[int(v)] if isinstance(v, bytes) else v, ast.literal_eval(template)
    )


@torch._dynamo.assume_constant_result
def _paths(name: str, template: str) -> nested.Structure:
    """The path of every entry of the result that is by name."""
    params = ast.literal_eval(template)[0]
    own = _known[name]._model.parameters()
    flat = nested.flatten(params)
    kept = [not own or own[k].requires_grad for k in flat]
    return tuple(p for p, k in zip(nested.structure(params), kept, strict=True) if k)


@torch.library.custom_op("pexgrad::call", mutates_args=())
def _call(tensors: list[Tensor], name: str, template: str, cast: str) -> list[Tensor]:
    transform = _known[name]
    params, x, y, options, state = _filled(template, tensors)
    _refuse_changed(state, _state(transform, params))
    device = tensors[0].device.type
    # also where it is off, it wants a dtype
    autocast = torch.autocast(device, getattr(torch, cast or "bfloat16"), enabled=bool(cast))
    # inside an operation autograd and tracing are switched off below any `enable_grad`
    with torch._C._ForceDispatchKeyGuard(*_usual_keys()), autocast:
        result = pytree.tree_leaves(transform(params, x, y, **options))
    like = _fake_call(tensors, name, template, cast, device="meta")
    # an operation's results may not share memory, and are laid out as the compiler was told
    return [
        t.detach().to(m.dtype).clone(memory_format=torch.contiguous_format)
        for t, m in zip(result, like, strict=True)
    ]


@functools.cache
def _usual_keys() -> list[Any]:
    """The dispatch keys that a new thread includes and excludes."""
    found: list[Any] = []

    def look() -> None:
        found.extend((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


@_call.register_fake
def _fake_call(
    tensors: list[Tensor], name: str, template: str, cast: str, device: Any = None
) -> list[Tensor]:
    params, x, y, *_ = _filled(template, tensors)
    flat = nested.flatten(params)
    entries = [flat[nested.name_of(path)] for path in _paths(name, template)]
    (batch, *_) = (t.shape[0] for t in trees.tensors((x, y)))
    return [t for part in _known[name]._parts() for t in part.outline(entries, batch, device)]


@_call.register_vmap
def _call_of_members(
    info: Any, in_dims: tuple[Any, ...], tensors: list[Tensor], name: str, template: str, cast: str
) -> tuple[list[Tensor], list[int]]:
    """`torch.func.vmap` inside compiled code: one call for each member."""

    def member(i: int) -> list[Tensor]:
        return [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims[0], strict=True)]

    results = [torch.ops.pexgrad.call(member(i), name, template, cast) for i in range(info.batch_size)]
    stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
    return stacked, [0] * len(stacked)
