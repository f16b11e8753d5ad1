"""Notices Python code that takes numbers out of tensors while it is traced: they are constants in the graph from then on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

# operations that give Python a number
_NUMBERS = {aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}


@contextlib.contextmanager
def noting_numbers(noted: list[Any]) -> Iterator[None]:
    """Append to `noted` what takes a number out of a tensor, be it a constant."""
    with (
        mock.patch.object(Tensor, "tolist", _noting_reads(Tensor.tolist, noted)),
        mock.patch.object(Tensor, "numpy", _noting_reads(Tensor.numpy, noted)),
        mock.patch.object(proxy_tensor, "proxy_call", _noting_calls(proxy_tensor.proxy_call, noted)),
    ):
        yield


def _noting_reads(read: Callable[..., Any], noted: list[Any]) -> Callable[..., Any]:
    """A method that gives Python numbers without an operation."""

    def reading(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        noted.append(read)
        if isinstance(self, FakeTensor):
            return read(self, *args, **kwargs)
        with _disable_current_modes():  # under which `numpy` would read the memory of a fake
            return read(self, *args, **kwargs)

    return reading


def _noting_calls(call: Callable[..., Any], noted: list[Any]) -> Callable[..., Any]:
    def calling(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func in _NUMBERS:
            noted.append(func)
        return call(mode, func, *args, **kwargs)

    return calling
