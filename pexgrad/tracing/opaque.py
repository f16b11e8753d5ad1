"""What a graph of operations would lose: a custom function's own backward, tensor hooks, and `.data`.

While a model is traced, `torch.autograd.Function.apply` becomes one opaque node that calls it again when the
graph runs, and `Tensor.register_hook` becomes a node through which the value passes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ..base import trees
from ..base.memory import storage_of
from ..base.modes import inside_transform
from ..base.nodes import WRITES, storage, use_instead
from ..base.source import calling_line
from ..errors import ANY_MODEL, TraceError, first_line

HOOKED = "hooked"  # key in a node's meta: the value passes through tensor hooks here


@contextlib.contextmanager
def opaque_functions() -> Iterator[None]:
    """Trace every custom `autograd.Function` as one node."""
    apply = Function.__dict__["apply"]

    def traced_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        plain = apply.__get__(None, cls)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            raise TraceError(
                f"torch.utils.checkpoint with use_reentrant=True (at {calling_line()}) gives gradients to .backward() alone, "
                "so there are none for one example; use checkpoint(..., use_reentrant=False)"
            )
        if get_proxy_mode() is None or cls.__module__.startswith("torch."):
            return plain(*args, **kwargs)
        return _record(_named(plain, cls.__name__), args, kwargs)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Function, "apply", classmethod(traced_apply)))
        for cls in _users(Function):
            forward = staticmethod(_traced_forward(cls, cls.forward, apply))
            patches.enter_context(mock.patch.object(cls, "forward", forward))
        yield


def _users(kind: type) -> Iterator[type[Function]]:
    """The user's classes of functions that have a forward of their own."""
    for cls in kind.__subclasses__():
        if isinstance(cls.__dict__.get("forward"), staticmethod) and not cls.__module__.startswith("torch."):
            yield cls
        yield from _users(cls)


def _traced_forward(cls: type[Function], forward: Callable[..., Any], apply: Any) -> Callable[..., Any]:
    """The forward of a function whose `apply` was bound before the trace: `ste = Ste.apply`."""

    def traced(*args: Any) -> Any:
        if get_proxy_mode() is None or inside_transform():
            return forward(*args)
        has_context = cls.setup_context is _SingleLevelFunction.setup_context
        of, given = (type(args[0])._forward_cls, args[1:]) if has_context else (cls, args)
        result, written = _run(forward, args, {})
        if any(r is v for r in trees.tensors(result) for v in given):
            raise TraceError(
                f"the custom autograd.Function {of.__name__}, whose apply was bound before (at {calling_line()}), returns one of "
                f"its inputs, which a graph cannot tell apart; call {of.__name__}.apply where it is used"
            )
        return _record(
            _named(apply.__get__(None, of), of.__name__), given, {}, result=result, written=written
        )

    return traced


@contextlib.contextmanager
def traced_hooks() -> Iterator[None]:
    """Trace every `Tensor.register_hook` as a node that registers it when the graph runs."""
    plain = Tensor.register_hook

    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        if (mode := get_proxy_mode()) is None:
            return plain(self, hook)
        own = None
        if not mode.pre_dispatch:  # the model's own derivatives are taken now
            with torch._C.DisableTorchFunction():
                own = plain(self, hook)
        before = mode.tracer.unwrap_proxy(self)
        # one node for all hooks of a value: they run in turn
        hooks = before.node.meta.get(HOOKED) if isinstance(before, fx.Proxy) else None
        if not hooks:
            hooks = OrderedDict[int, Callable[[Tensor], Tensor | None]]()
            _record(_attaching(hooks, plain), (self,), {}, meta={HOOKED: hooks}, result=self)
        handle = _Handle(hooks, own)  # a handle removed during the forward leaves nothing to register
        hooks[handle.id] = hook
        return handle

    with mock.patch.object(Tensor, "register_hook", register_hook):
        yield


class _Handle(RemovableHandle):
    """Takes a hook out of the graph, and out of the trace's own run, where it is."""

    def __init__(self, hooks: dict[int, Any], own: RemovableHandle | None):
        super().__init__(hooks)
        self._own = own

    def remove(self) -> None:
        super().remove()
        if self._own is not None:
            self._own.remove()


def _attaching(hooks: dict[int, Any], register: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def attach(value: Tensor) -> Tensor:
        out = value.view_as(value)
        if out.requires_grad:
            for hook in hooks.values():
                register(out, hook)
        return out

    return attach


@contextlib.contextmanager
def traced_data() -> Iterator[None]:
    """Trace `x.data` as `x.detach()`, and `x.data = y` as the value y with the gradients of x.

    torch makes both behind the back of everything that records operations.
    """
    plain = torch._C.TensorBase.data

    def get(self: Tensor) -> Tensor:
        if isinstance(self, FakeTensor) and get_proxy_mode() is not None:
            return self.detach()
        return plain.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    def set_(self: Tensor, data: Tensor) -> None:
        mode = get_proxy_mode()
        if mode is not None and isinstance(self, FakeTensor) and not _is_same_memory(self, data):
            if data.shape != self.shape or data.dtype != self.dtype:
                raise TraceError(
                    f"x.data (at {calling_line()}) is given other data of shape {tuple(data.shape)} in {data.dtype} for "
                    f"{tuple(self.shape)} in {self.dtype}, which a graph cannot follow; use a new tensor, or {ANY_MODEL}"
                )
            with torch.enable_grad():
                data = self - self.detach() + data.detach()  # the first two are zero
            proxy: Any = mode.tracer.unwrap_proxy(data)
            track_tensor_tree(self, proxy, constant=None, tracer=mode.tracer)
        with torch._C.DisableTorchFunction():  # which would come here again
            plain.__set__(self, data)  # pyright: ignore[reportAttributeAccessIssue]

    with mock.patch.object(Tensor, "data", property(get, set_), create=True):
        yield


def _is_same_memory(t: Tensor, data: Tensor) -> bool:
    """Whether one is the other, or a view of all of it, as in `x.data *= 2`."""
    mine, other = ((storage_of(v), v.storage_offset(), v.shape, v.stride()) for v in (t, data))
    return mine == other


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: dict[str, Any] | None = None,
    result: Tensor | None = None,
    written: Set[int | None] = frozenset(),
) -> Any:
    """Add `function(*args)` to the graph as one call; `result`, if given, is what it stands for from now on.

    Then `written` is the memory that it has written to.
    """
    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    proxy_args, proxy_kwargs = tree_map(tracer.unwrap_proxy, (args, kwargs))
    try:
        proxy = tracer.create_proxy("call_function", function, proxy_args, proxy_kwargs)
    except NotImplementedError as e:  # a module, say: its parameters would not be the call's
        what = first_line(e).removeprefix("argument of type: ")
        raise TraceError(
            f"the custom autograd.Function {function.__name__} is given objects that a graph cannot hold ({what}); give it "
            f"the tensors themselves, or {ANY_MODEL}"
        ) from e
    proxy.node.meta.update(meta or {})
    if result is None:
        made, written = _run(function, args, kwargs)
        result = tree_map(_fresh, made)
    proxy.node.meta[WRITES] = [i for i, n in enumerate(proxy.node.all_input_nodes) if storage(n) in written]
    track_tensor_tree(result, proxy, constant=None, tracer=tracer)
    return result


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, set[int | None]]:
    """What a function returns, and the memory that it writes to; past the graph, with the modes that it switches for itself."""
    given = [(v, v._version) for v in trees.tensors((args, kwargs))]
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        result = function(*args, **kwargs)
    return result, {storage_of(v) for v, version in given if v._version != version}


def is_opaque(node: fx.Node) -> bool:
    """Whether a node calls a custom `autograd.Function`, or runs tensor hooks; the functions of such nodes are made here."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == __name__


def _fresh(value: Any) -> Any:
    # an output that is one of the inputs would take over that input's place in the graph
    return value.view_as(value) if isinstance(value, Tensor) else value


def settle_hooks(graph: fx.Graph) -> None:
    """Let every use of a hooked value, earlier ones included, pass through its hooks."""
    for node in list(graph.nodes):
        if node.meta.get(HOOKED):
            (source,) = node.all_input_nodes
            source.append(node)
            use_instead(node, source)
