"""Stages 6 to 8: run the program, take the cotangents, and give each site's factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .factors import Factor, Replay
from .layout import Layout
from .plan import Use
from .sites import Operand, Site
from .tap import Forward, Slots


@dataclass(frozen=True, eq=False)
class BoundSite:
    """A site with everything that evaluating it takes."""

    site: Site
    uses: list[Use]
    slots: Slots
    layouts: tuple[Layout, ...]  # of each activation
    residual_layouts: dict[fx.Node, Layout]  # of each batched residual


def cotangents(forward: Forward, losses: Tensor, create_graph: bool) -> list[Tensor | None]:
    """dL_b / d(activation), for every edge: one backward that computes no parameter's gradient."""
    edges = [e for e in forward.edges if e is not None]
    if not edges or not losses.requires_grad:
        return [None] * len(forward.edges)
    with torch.enable_grad():
        total = losses.sum()
    grads = iter(torch.autograd.grad(total, edges, create_graph=create_graph, allow_unused=True))
    return [None if e is None else next(grads) for e in forward.edges]


def factors(
    bound: BoundSite, forward: Forward, grads: Sequence[Tensor | None], batch: int, conv_rule: str, create_graph: bool
) -> Iterator[tuple[Operand, Tensor, Factor]]:
    """Each operand of a site that the losses depend on: the operand, its value, its factor."""
    own = [grads[i] for i in bound.slots.edges]
    if all(g is None for g in own):
        return
    for use, slot in zip(bound.uses, bound.slots.operands, strict=True):
        operand_value = forward.operands[slot]
        if use.rule is None:
            factor: Factor = _replay(bound, use, forward, own, operand_value, batch, create_graph)
        else:
            factor = _by_rule(bound, use, forward, own[0], operand_value, batch, conv_rule)
        yield use.operand, operand_value, factor


def _by_rule(
    bound: BoundSite, use: Use, forward: Forward, cotangent: Tensor | None, operand: Tensor, batch: int, conv_rule: str
) -> Factor:
    assert use.rule is not None and cotangent is not None
    (layout,) = bound.layouts
    given = {"shape": operand.shape, "dtype": operand.dtype, "batch_dim": layout.dim, "conv_rule": conv_rule}

    def residual(node: fx.Node) -> Any:
        kept = forward.residuals[bound.slots.residuals[node]]
        if isinstance(kept, Tensor) and not torch.is_grad_enabled():
            kept = kept.detach()
        at = bound.residual_layouts.get(node)
        return kept if at is None else at.split(kept, batch)

    def argument(name: str) -> Any:
        return given[name] if name in given else fx.node.map_arg(bound.site.arguments[name], residual)

    return use.rule.function(
        layout.split(cotangent, batch),
        *(argument(n) for n in use.rule.residuals),
        **{n: argument(n) for n in use.rule.statics},
    )


def _replay(
    bound: BoundSite, use: Use, forward: Forward, grads: Sequence[Tensor | None], operand: Tensor, batch: int,
    create_graph: bool,
) -> Replay:  # fmt: skip
    """Run the operation once more on its own; each example's row is then one vector-Jacobian product."""
    # an alias, so that only this use of the operand counts: residuals may depend on it too
    leaf = operand.view_as(operand) if create_graph else operand.detach().requires_grad_()

    def argument(node: fx.Node) -> Any:
        if node is use.operand.node:
            return leaf
        kept = forward.residuals[bound.slots.residuals[node]]
        return kept.detach() if isinstance(kept, Tensor) and not create_graph else kept

    args, kwargs = fx.node.map_arg((bound.site.node.args, bound.site.node.kwargs), argument)
    with torch.enable_grad():
        result = bound.site.node.target(*args, **kwargs)  # type: ignore[operator]
    outputs = _outputs(result, bound.site)
    present = [(out, g, at) for out, g, at in zip(outputs, grads, bound.layouts, strict=True) if g is not None]

    def vjp(masked: list[Tensor]) -> Tensor:
        (row,) = torch.autograd.grad(
            [out for out, _, _ in present], [leaf], masked,
            retain_graph=True, create_graph=create_graph, allow_unused=True,
        )  # fmt: skip
        return torch.zeros_like(operand) if row is None else row

    return Replay(
        lambda b: vjp([at.only(g, batch, b) for _, g, at in present]),
        lambda w: vjp([at.scale(g, w) for _, g, at in present]),
        0, batch, batch, tuple(operand.shape), operand.dtype,
    )  # fmt: skip


def _outputs(result: Any, site: Site) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [result[out.args[1]] for out in site.outputs]  # each output is a getitem of the operation
