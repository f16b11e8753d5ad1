"""In each call: the cotangents of the activations, by one backward that stops there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..base.fakes import is_recorded
from .layout import Anywhere, Layout
from .tap import Forward

# elements of an output from which a copy of its cotangent takes much longer than a call of autograd
LARGE = 1 << 20


def way_out(outputs: Sequence[Tensor]) -> GradientEdge | None:
    """Where the cotangent of the model's output arrives, if there is one output and a large one that lies contiguous.

    It is taken before the loss may write into the output.
    """
    active = [t for t in outputs if t.requires_grad]
    if len(active) != 1 or is_recorded(active[0]):
        return None
    (output,) = active
    return get_gradient_edge(output) if output.numel() >= LARGE and output.is_contiguous() else None


def cotangents(
    forward: Forward,
    losses: Tensor,
    out: GradientEdge | None,
    sites: Sequence[Sequence[Layout]],
    create_graph: bool,
) -> list[list[Tensor | None]]:
    """dL_b / d(activation), for every activation of every site: one backward that computes no parameter's gradient.

    Where the examples' parts of an activation overlap, (b, *shape): there it takes a backward for each example. `sites` are
    the layouts of each site's activations.
    """
    edges, layouts = forward.edges, [at for site in sites for at in site]
    if not losses.requires_grad:
        return _by_site([None] * len(edges), sites)
    there = [i for i, e in enumerate(edges) if e is not None]
    apart = [i for i in there if isinstance(layouts[i], Anywhere)]
    together = [i for i in there if not isinstance(layouts[i], Anywhere)]
    found: dict[int, Tensor | None] = {}
    if apart:
        found |= _cotangents_apart(forward, losses, apart, create_graph)
    if together:
        with torch.enable_grad():
            total = losses.sum()
        grads = _backward(total, out, [edges[i] for i in together], create_graph)
        found |= zip(together, grads, strict=True)
    return _by_site(forward.cotangents(found.get(i) for i in range(len(edges))), sites)


def _by_site(cotangents: list[Tensor | None], sites: Sequence[Sequence[Layout]]) -> list[list[Tensor | None]]:
    left = iter(cotangents)
    return [list(islice(left, len(site))) for site in sites]


def _backward(
    total: Tensor, out: GradientEdge | None, edges: list[Any], create_graph: bool
) -> Sequence[Tensor | None]:
    """One backward; it rests at a large output, whose cotangent is brought into order there.

    A language model's logits are transposed for the loss, and their cotangent would be copied twice otherwise, by the
    operation's own backward and by the factor.
    """
    if out is None:
        return torch.autograd.grad(total, edges, create_graph=create_graph, allow_unused=True)
    (cotangent,) = torch.autograd.grad(total, [out], create_graph=create_graph, allow_unused=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if cotangent is None:
        return [None] * len(edges)
    return torch.autograd.grad(
        [out], edges, [cotangent.contiguous()], create_graph=create_graph, allow_unused=True
    )  # pyright: ignore[reportArgumentType, reportCallIssue]


def _cotangents_apart(
    forward: Forward, losses: Tensor, edges: list[int], create_graph: bool
) -> dict[int, Tensor | None]:
    of_examples = [
        torch.autograd.grad(  # pyright: ignore[reportCallIssue]
            loss, [forward.edges[i] for i in edges],  # pyright: ignore[reportArgumentType]
            retain_graph=True, create_graph=create_graph, allow_unused=True,
        )
        for loss in losses.unbind()
    ]  # fmt: skip
    return {i: _stacked(column) for i, column in zip(edges, zip(*of_examples, strict=True), strict=True)}


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = next((g for g in grads if g is not None), None)
    if present is None:
        return None
    return torch.stack([torch.zeros_like(present) if g is None else g for g in grads])
