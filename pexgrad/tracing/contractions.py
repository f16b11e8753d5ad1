"""Products of several tensors, or with a term added, as `einsum` of two, `bmm` and `matmul`, so that the rules of these apply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from ..base.equations import written_out

aten = torch.ops.aten


def einsum(equation: str, tensors: Sequence[Tensor], *, path: Any = None) -> Any:
    """Two at a time from the left, in letters; an ellipsis becomes the letters that it stands for."""
    inputs, out = written_out(equation, [t.dim() for t in tensors])
    plain = all(term.isalpha() and len(set(term)) == len(term) for term in inputs)
    if not plain or path or (len(inputs) < 3 and "..." not in equation) or _repeats(inputs, tensors):
        return NotImplemented
    term, x = inputs[0], tensors[0]
    for i in range(1, len(inputs)):
        later = set("".join(inputs[i + 1 :]) + out)
        kept = (
            "".join(c for c in dict.fromkeys(term + inputs[i]) if c in later) if i < len(inputs) - 1 else out
        )
        x = torch.einsum(f"{term},{inputs[i]}->{kept}", x, tensors[i])
        term = kept
    return x if len(inputs) > 1 else torch.einsum(f"{term}->{out}", x)


def _repeats(inputs: list[str], tensors: Sequence[Tensor]) -> bool:
    """Whether a dimension of size 1 is repeated along a longer one."""
    sizes: dict[str, list[Any]] = {}
    for term, t in zip(inputs, tensors, strict=True):
        for c, n in zip(term, t.shape, strict=True):
            sizes.setdefault(c, []).append(n)
    ones = [[isinstance(n, int) and n == 1 for n in found] for found in sizes.values()]
    return any(any(found) and not all(found) for found in ones)


def with_sum(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """beta z + alpha product(x, y), in which a beta of zero leaves z out."""

    def added(z: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        made = product(x, y)
        made = made if alpha == 1 else made * alpha
        return made + (z if beta == 1 else z * beta) if beta else made

    return added


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`mv` and `dot` are `matmul`."""
    return aten.matmul.default(x, y)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """With one output, and no dimension for it: x weight."""
    return matmul(x, weight) if weight.dim() == 1 and bias is None else NotImplemented


def chain(matrices: Sequence[Tensor]) -> Any:
    """From the left; torch's own way looks for a cheap order, in which the batch size is a plain number."""
    sizes = [n for m in matrices for n in m.shape]
    return functools.reduce(matmul, matrices) if any(isinstance(n, SymInt) for n in sizes) else NotImplemented


CONTRACTIONS = {
    aten.linalg_multi_dot.default: chain,
    aten.chain_matmul.default: chain,
    aten.einsum.default: einsum,
    aten.baddbmm.default: with_sum(torch.bmm),
    aten.addbmm.default: with_sum(lambda x, y: torch.bmm(x, y).sum(0)),
    aten.addmv.default: with_sum(matmul),
    aten.linear.default: linear,
    aten.mv.default: matmul,
    aten.dot.default: matmul,
}
