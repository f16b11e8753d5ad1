"""What has to be noticed, or done otherwise, while a model's code runs for a trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import TensorBase
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.experimental.sym_node import SymNode
from torch.jit import ScriptFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..base.fakes import computes_metadata, quiet, symbolic_len
from ..base.modes import in_this_thread, inside_transform
from ..base.source import calling_line
from ..errors import ANY_MODEL, TraceError
from .numbers import noting_numbers
from .opaque import opaque_functions, traced_data, traced_hooks
from .origins import noting_source
from .readings import Reader, answering


@contextlib.contextmanager
def watching(batch: sympy.Symbol, reader: Reader) -> Iterator[list[sympy.Basic]]:
    """Gives the conditions on the batch size that the model's own code branches on."""
    branches: list[sympy.Basic] = []
    running: list[None] = []  # one entry for each operation that is running, the innermost last
    with (
        torch.enable_grad(),
        opaque_functions(),
        traced_hooks(),
        traced_data(),
        quiet(),
        answering(reader, running),
        torch.backends.opt_einsum.flags(enabled=False),  # its search for a path fixes every size
        symbolic_len(),
        mock.patch.multiple(
            torch.inference_mode,
            __enter__=in_this_thread(_without_gradients, torch.inference_mode.__enter__),
            __exit__=in_this_thread(_as_before, torch.inference_mode.__exit__),
        ),
        mock.patch.object(Tensor, "as_subclass", in_this_thread(_as_subclass, Tensor.as_subclass)),
        mock.patch.object(nn.Module, "_apply", in_this_thread(_apply, nn.Module._apply)),
        mock.patch.object(nn.TransformerEncoder, "forward", _without_nesting(nn.TransformerEncoder.forward)),
        mock.patch.object(ScriptFunction, "__call__", in_this_thread(_as_written, ScriptFunction.__call__)),
        noting_numbers(reader.numbers),
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", _no_metadata),
        mock.patch.object(PythonKeyTracer, "create_node", noting_source(PythonKeyTracer.create_node)),
        mock.patch.object(proxy_tensor, "proxy_call", _noting_depth(proxy_tensor.proxy_call, running)),
        mock.patch.object(SymNode, "bool_", _noting_branches(SymNode.bool_, batch, branches, running)),
    ):
        yield branches


_DERIVATIVES = {torch.autograd.grad, Tensor.backward}


class Asked(TorchFunctionMode):
    """Notes the real tensors that code computes with or asks for their shape, and whether it takes derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self.differentiates = False  # whether it takes derivatives, or uses a transform of torch.func

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.differentiates = self.differentiates or func in _DERIVATIVES or inside_transform()
        for v in pytree.tree_leaves((args, kwargs)):
            if isinstance(v, Tensor) and not isinstance(v, FakeTensor):
                self.tensors[id(v)] = v
        run: Callable[..., Any] = _UNASKING.get(func) or func
        return run(*args, **(kwargs or {}))


def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Without a question whether the smallest of all sizes, the batch's among them, is zero."""
    return torch.affine_grid_generator(theta, size, bool(align_corners))


# functions of torch whose Python code asks for the batch size -> the same without its checks, which the model has passed before
_UNASKING: dict[Any, Callable[..., Any]] = {F.affine_grid: _affine_grid}


def _noting_depth(call: Callable[..., Any], running: list[None]) -> Callable[..., Any]:
    """Note how deep operations are in one another."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        running.append(None)
        try:
            return call(*args, **kwargs)
        finally:
            running.pop()

    return noted


def _noting_branches(
    bool_: Callable[[SymNode], bool], batch: sympy.Symbol, branches: list[sympy.Basic], running: list[None]
) -> Callable[[SymNode], bool]:
    """Note what Python code asks; what operations ask while they run is for metadata, on which the graph does not depend."""

    def noted(self: SymNode) -> bool:
        condition = self.expr
        answer = bool_(self)
        if not running and condition.free_symbols == {batch} and not _is_metadata(sys._getframe(1)):
            taken = condition if answer else sympy.Not(condition)
            if not _is_another_number(taken, batch):
                branches.append(taken)
        return answer

    return noted


def _is_another_number(condition: sympy.Basic, batch: sympy.Symbol) -> bool:
    """Whether it says that the batch size is not some number from two on: so it is for a batch of one, whose code counts.

    Code asks for it where it compares shapes of tensors, `(B, 5) == (5,)`, which Python does number by number.
    """
    return isinstance(condition, sympy.Ne) and any(
        other == batch and isinstance(number, sympy.Integer) and int(number) > 1
        for other, number in (condition.args, condition.args[::-1])
    )


def _without_gradients(mode: torch.inference_mode) -> None:
    """`torch.inference_mode()` for a trace, which would not show it, is `torch.no_grad()`."""
    mode._no_grad = torch.no_grad() if mode.mode else contextlib.nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
    mode._no_grad.__enter__()  # pyright: ignore[reportAttributeAccessIssue]


def _as_before(mode: torch.inference_mode, *raised: Any) -> None:
    mode._no_grad.__exit__(*raised)  # pyright: ignore[reportAttributeAccessIssue]


def _no_metadata(*_: Any) -> None:
    """In place of what torch notes of each value, in a fifth of the time of a trace, and nobody reads here."""


def _as_subclass(t: Tensor, kind: type[Tensor]) -> Tensor:
    """Of what stands for a plain tensor, a view: torch takes the numbers, of which a trace has none."""
    is_plain = kind is Tensor and isinstance(t, FakeTensor)
    return t.view_as(t) if is_plain else TensorBase.as_subclass(t, kind)


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module.to(...)` inside a forward: the copy that is traced simply holds the converted tensors."""
    for m in module.modules() if recurse else (module,):
        for held in (m._parameters, m._buffers):
            held.update({k: fn(t) for k, t in held.items() if t is not None})  # type: ignore[misc]
    return module


def _without_nesting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An encoder that is differentiated uses no nested tensors, but asks first whether its mask allows them, which is data."""

    def run(self: nn.TransformerEncoder, src: Tensor, *args: Any, **kwargs: Any) -> Any:
        differentiated = src.requires_grad or any(p.requires_grad for p in self.layers[0].parameters())
        if not (differentiated and torch.is_grad_enabled()):
            return forward(self, src, *args, **kwargs)
        with mock.patch.object(torch, "_nested_tensor_from_mask_left_aligned", return_value=False):
            return forward(self, src, *args, **kwargs)

    return run


def _as_written(function: ScriptFunction, *args: Any, **kwargs: Any) -> Any:
    """The Python code of a scripted function: what TorchScript puts in its place after a run has no gradient in a trace."""
    code = getattr(function, "_torchdynamo_inline", None)  # what torch.compile takes, too
    if code is None:
        raise TraceError(
            f"the function '{function.name}' (at {calling_line()}) is TorchScript without the Python code that it was made of, "
            f"so its gradient cannot be traced; call the code itself, or {ANY_MODEL}"
        )
    return code(*args, **kwargs)


def _is_metadata(frame: FrameType | None) -> bool:
    """Whether torch's shape functions ask: what they call between them and the question takes a few frames."""
    for _ in range(6):
        if frame is None:
            return False
        if computes_metadata(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
