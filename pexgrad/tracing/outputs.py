"""What a trace keeps of the parts of a model's output that are no tensors."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ANY_MODEL, TraceError

FROM_GRAPH = object()  # stands for a tensor that the graph gives


class Untraced:
    """Stands in the output for an object that the trace cannot carry; any use of it raises."""

    def __init__(self, kind: str):
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Untraced)).refuse()

    def refuse(self, *_: Any) -> NoReturn:
        """Say what cannot be used."""
        raise TraceError(
            f"the loss uses a {self._kind} in the model's output, which has no per-example gradient; return what it is computed "
            f"from, with the batch on a dimension, and compute it in the loss, or {ANY_MODEL}"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __pow__ = __neg__ = __float__ = __bool__ = __lt__ = __gt__ = __getitem__ = __iter__ = __len__ = refuse

    def __repr__(self) -> str:
        return f"<{self._kind}, not carried by the trace>"


def stand_in(leaf: Any) -> Any:
    """What is kept of a part of the model's output."""
    if isinstance(leaf, Tensor):
        return FROM_GRAPH
    if leaf is None or isinstance(leaf, bool | int | float | str | type):
        return leaf
    return Untraced(type(leaf).__name__)
