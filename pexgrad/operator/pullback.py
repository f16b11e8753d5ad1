"""From the rows of a derived value back to the rows of the parameters that it is computed from.

A value that is a view of a parameter (a transpose, a slice, a head's share of a packed weight) is a strided window
into it: its rows are written through the same window. Anything else is differentiated by autograd, one
example at a time for rows, once for a weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ..base.fakes import is_recorded
from ..base.history import is_through_custom
from ..base.memory import is_injective
from ..base.nodes import storage, value
from ..base.numerics import real
from ..stages.sites import Operand
from ..tracing.trace import Trace


@dataclass(frozen=True)
class Window:
    """A strided view of one parameter."""

    param: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool  # it is the parameter itself
    onto: bool  # it shows every element exactly once, so norms are the same

    @classmethod
    def identity(cls, name: str, p: Tensor) -> Window:
        """The parameter itself."""
        return cls(name, tuple(p.shape), tuple(p.stride()), 0, True, True)

    @property
    def isometric(self) -> bool:
        """Whether rows of the view have the norm of the parameter's rows: no element is shown twice."""
        return all(n == 1 or s for n, s in zip(self.size, self.stride, strict=True))

    def disjoint(self, other: Window) -> bool:
        """Whether two windows of one parameter certainly show no common element."""
        mine, theirs = self._reach(), other._reach()
        return self.param != other.param or mine[1] < theirs[0] or theirs[1] < mine[0]

    def _reach(self) -> tuple[int, int]:
        return self.offset, self.offset + sum(
            (n - 1) * s for n, s in zip(self.size, self.stride, strict=True)
        )

    def of(self, v: Tensor, p: Tensor) -> Tensor:
        """The same view of `v`, a tensor shaped like the parameter `p`."""
        if self.whole:
            return v
        memory = torch.empty_strided(p.shape, p.stride(), dtype=v.dtype, device=v.device).copy_(v)
        return memory.as_strided(self.size, self.stride, self.offset)

    def rows(self, rows: Tensor, p: Tensor) -> Tensor:
        """(b, *p.shape) from rows (b, *size) of the view."""
        if self.whole:
            return rows
        repeated = [i for i, n in enumerate(self.stride) if n == 0 and self.size[i] != 1]
        if repeated:
            rows = rows.sum([1 + i for i in repeated], keepdim=True)
        batch, size = rows.shape[0], [1 if i in repeated else n for i, n in enumerate(self.size)]
        if is_recorded(rows):
            return self._placed(rows, size, p)
        memory = rows.new_empty(batch, p.numel()) if self.onto else rows.new_zeros(batch, p.numel())
        memory.as_strided((batch, *size), (p.numel(), *self.stride), self.offset).copy_(rows)
        return memory.as_strided((batch, *p.shape), (p.numel(), *p.stride()))

    def _placed(self, rows: Tensor, size: list[int], p: Tensor) -> Tensor:
        """The same without writing through a view: by the place of every element in the parameter's memory."""
        place = torch.full((), self.offset, device=rows.device)
        for i, (n, stride) in enumerate(zip(size, self.stride, strict=True)):
            steps = torch.arange(n, device=rows.device) * stride
            place = place + steps.reshape(-1, *[1] * (len(size) - 1 - i))
        memory = rows.new_zeros(rows.shape[0], p.numel())
        memory = memory.index_copy(1, place.reshape(-1), rows.reshape(rows.shape[0], -1))
        # the outermost dimension first
        order = sorted(range(p.dim()), key=lambda i: (-p.stride(i), p.shape[i] == 1))
        outer_first = memory.reshape(rows.shape[0], *(p.shape[i] for i in order))
        return outer_first.permute(0, *(1 + order.index(i) for i in range(p.dim())))


def find_window(trace: Trace, operand: Operand, params: dict[str, Tensor]) -> Window | None:
    """The window that an operand is, if it is a view of one dense parameter; None where it is not."""
    view = value(operand.node)
    for name in operand.params:
        node = trace.params[name]
        p = params[name]
        if storage(node) != storage(operand.node) or view.dtype != p.dtype or view.is_conj() or view.is_neg():
            continue
        if (
            not torch.ops.aten.is_non_overlapping_and_dense(p)
            or _overlaps(view)
            or not _is_seen_through_views(operand.node, node)
        ):
            return None
        # relative: the parameter may itself be a part of a larger piece of memory
        offset = int(view.storage_offset()) - int(value(node).storage_offset())
        whole = view.shape == value(node).shape and view.stride() == value(node).stride() and not offset
        onto = view.numel() == p.numel() and 0 not in view.stride()
        return Window(name, tuple(view.shape), tuple(view.stride()), offset, whole, onto)
    return None


def _is_seen_through_views(seen: fx.Node, param: fx.Node) -> bool:
    """Whether torch's own views lead to a parameter: a user's function that returns one may have a backward of its own."""
    while seen is not param:
        if seen.op != "call_function" or not isinstance(seen.target, OpOverload | BuiltinFunctionType):
            return False
        seen = seen.all_input_nodes[0]
    return True


def _overlaps(view: Tensor) -> bool:
    """Whether two positions, not on an expanded dimension, show one element."""
    shown = [(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if s]
    return not is_injective([n for n, _ in shown], [s for _, s in shown])


def is_linear(derived: Tensor) -> bool:
    """Whether the pullback is known to be linear: torch's own are; a custom `autograd.Function` may do anything, or detach."""
    return not is_through_custom(derived)


def vjp(
    derived: Tensor, leaves: dict[str, Tensor], names: tuple[str, ...], cotangent: Tensor, create_graph: bool
) -> Iterator[tuple[str, Tensor]]:
    """The gradient of `derived` with respect to the parameters it is computed from."""
    grads = torch.autograd.grad(
        [derived], [leaves[k] for k in names], [cotangent.to(derived.dtype)],
        retain_graph=True, create_graph=create_graph, allow_unused=True,
    )  # fmt: skip
    for k, g in zip(names, grads, strict=True):
        if g is not None:
            yield k, g


def vjp_rows(
    derived: Tensor, leaves: dict[str, Tensor], names: tuple[str, ...], rows: Tensor, create_graph: bool
) -> Iterator[tuple[str, Tensor]]:
    """The same for each of rows (b, *derived.shape): all at once where autograd can, or one example at a time."""
    together = None if create_graph or is_recorded(rows) else _vjp_together(derived, leaves, names, rows)
    if together is not None:
        yield from together
        return
    found: dict[str, list[Tensor]] = {}
    for row in rows:
        for k, g in vjp(derived, leaves, names, row, create_graph):
            found.setdefault(k, []).append(g)
    for k, g in found.items():
        yield k, torch.stack(g)


def _vjp_together(
    derived: Tensor, leaves: dict[str, Tensor], names: tuple[str, ...], rows: Tensor
) -> list[tuple[str, Tensor]] | None:
    """The same in one pass through torch's own operations; None where one of them cannot take a batch of cotangents."""
    if not is_linear(derived) or not len(rows):
        return None
    try:
        grads = torch.autograd.grad(
            [derived], [leaves[k] for k in names], [rows.to(derived.dtype)],
            retain_graph=True, allow_unused=True, is_grads_batched=True,
        )  # fmt: skip
    except RuntimeError:
        return None
    return [(k, g) for k, g in zip(names, grads, strict=True) if g is not None]


def jvp(
    derived: Tensor,
    leaves: dict[str, Tensor],
    names: tuple[str, ...],
    v: dict[str, Tensor],
    create_graph: bool,
) -> Tensor | None:
    """The derivative of `derived` along `v`, as the gradient of a vector-Jacobian product by its (linear) cotangent.

    None where torch's backward of an operation has none of its own, or none at zero (that of `logcumsumexp` takes a logarithm).
    """
    with torch.enable_grad():
        u = torch.zeros_like(derived).requires_grad_()
        try:
            grads = dict(vjp(derived, leaves, names, u, create_graph=True))
            total = [real(g * v[k].conj()).sum() for k, g in grads.items() if g.requires_grad]
            if not total:
                return torch.zeros_like(derived)
            (tangent,) = torch.autograd.grad(torch.stack(total).sum(), [u], create_graph=create_graph)
        except (RuntimeError, NotImplementedError):
            return None
    known = is_recorded(tangent) or bool(tangent.isfinite().all())
    return tangent if known else None
