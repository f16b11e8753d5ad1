"""Where in the user's program an operation, or an error, comes from."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

from ..base.source import calling_line, is_library


def noting_source(create_node: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
    """Note on each node the user's line and the module that it comes from."""

    def noted(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(self, *args, **kwargs)
        node.meta["source"] = calling_line()
        node.meta["path"] = _paths[-1] if _paths else ""
        return node

    return noted


_paths: list[str] = []


@contextlib.contextmanager
def module_paths(forward: Callable[..., Any]) -> Iterator[None]:
    """Keep the path of the module that is running in `_paths`."""
    if not isinstance(forward, nn.Module):
        yield
        return

    def leave(*_: Any) -> None:
        _paths.pop()

    hooks = []
    for name, m in forward.named_modules():
        hooks.append(m.register_forward_pre_hook(lambda *_, path=name: _paths.append(path), prepend=True))
        hooks.append(m.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _paths.clear()


def user_line(e: BaseException) -> str:
    """The innermost line of the user's code in the traceback of `e`, as ` (at file.py:12)`."""
    lines = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(e.__traceback__)]
    own = [f" (at {name}:{line})" for name, line in lines if not is_library(name)]
    return own[-1] if own else ""
