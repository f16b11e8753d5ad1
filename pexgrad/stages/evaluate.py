"""In each call: from the values that were kept and the cotangents of the activations, each site's factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ..base.fakes import is_recorded
from ..base.nodes import nodes_in
from ..factors import Factor, Replay
from ..rules.registry import GIVEN, Rule
from .layout import Layout
from .plan import Use
from .sites import Operand, Site
from .tap import Forward


@dataclass(frozen=True, eq=False)
class BoundSite:
    """A site with everything that evaluating it takes."""

    site: Site
    uses: list[Use]
    residuals: dict[fx.Node, Kept]
    layouts: tuple[Layout, ...]  # of each activation

    @cached_property
    def calls(self) -> list[RuleCall | None]:
        """How each use's rule is called; None for the fallback."""
        return [None if use.rule is None else self._call(use.rule) for use in self.uses]

    def _call(self, rule: Rule) -> RuleCall:
        arguments = {n: self._source(n) for n in (*rule.residuals, *rule.statics) if n not in GIVEN}
        given = tuple(n for n in rule.statics if n in GIVEN)
        statics = {n: arguments[n] for n in rule.statics if n in arguments}
        return RuleCall(rule.function, [arguments[n] for n in rule.residuals], statics, given)

    def _source(self, name: str) -> Any:
        argument = self.site.arguments[name]
        if isinstance(argument, fx.Node):
            return self.residuals[argument]
        return Tree(argument) if any(True for _ in nodes_in(argument)) else argument


class Kept(NamedTuple):
    """An argument that the forward pass kept."""

    node: fx.Node  # whose value it is
    layout: Layout | None  # None: it has no batch


class Tree(NamedTuple):
    """An argument that holds nodes: a size list with the batch size in it, a list of tensors."""

    argument: Any


@dataclass(frozen=True, eq=False)
class RuleCall:
    """A rule's function and where its arguments come from."""

    function: Callable[..., Factor]
    residuals: list[Any]
    statics: dict[str, Any]
    given: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Backward:
    """What a call has computed when the factors of its sites are made."""

    forward: Forward
    batch: int
    conv_rule: str
    create_graph: bool

    def factors(
        self, bound: BoundSite, own: Sequence[Tensor | None]
    ) -> Iterator[tuple[Operand, Tensor, Factor]]:
        """Each operand of a site that the losses depend on: the operand, its value, its factor, from the cotangents."""
        if all(g is None for g in own):
            return
        cotangent = None
        for use, call in zip(bound.uses, bound.calls, strict=True):
            value = self.forward.values[use.operand.node]
            if call is None:
                factor: Factor = self._replay(bound, use, own, value)
            else:
                if cotangent is None:
                    assert own[0] is not None
                    cotangent = bound.layouts[0].split(own[0], self.batch)
                factor = self._by_rule(bound, call, cotangent, value)
                if not self.create_graph and not is_recorded(cotangent):
                    factor = factor.settled()  # what it is made of may go
            yield use.operand, value, factor

    def _by_rule(self, bound: BoundSite, call: RuleCall, cotangent: Tensor, operand: Tensor) -> Factor:
        given = {
            "shape": operand.shape,
            "dtype": operand.dtype,
            "batch_dim": bound.layouts[0].dim,
            "conv_rule": self.conv_rule,
        }

        def residual(node: fx.Node, at: Layout | None) -> Any:
            value = self.forward.values[node]
            if isinstance(value, Tensor) and not torch.is_grad_enabled():
                value = value.detach()
            return value if at is None else at.split(value, self.batch)

        def argument(source: Any) -> Any:
            if isinstance(source, Kept):
                return residual(*source)
            if isinstance(source, Tree):
                return map_arg(source.argument, lambda n: residual(*bound.residuals[n]))
            return source

        return call.function(
            cotangent,
            *map(argument, call.residuals),
            **{n: argument(a) for n, a in call.statics.items()},
            **{n: given[n] for n in call.given},
        )

    def _replay(self, bound: BoundSite, use: Use, own: Sequence[Tensor | None], operand: Tensor) -> Replay:
        """Run the operation once more on its own; each example's row is then one vector-Jacobian product."""
        # for the factor, which must not hold on to all of this
        batch, create_graph = self.batch, self.create_graph
        # an alias, so that only this use of the operand counts: residuals may depend on it too
        leaf = operand.view_as(operand) if create_graph else operand.detach().requires_grad_()

        def argument(node: fx.Node) -> Any:
            if node is use.operand.node:
                return leaf
            kept = self.forward.values[bound.residuals[node].node]
            return kept.detach() if isinstance(kept, Tensor) and not create_graph else kept

        args, kwargs = map_arg((bound.site.node.args, bound.site.node.kwargs), argument)
        with torch.enable_grad():
            result = bound.site.node.target(*args, **kwargs)  # type: ignore[operator]
        outputs = _outputs(result, bound.site)
        present = [
            (out, g, at)
            for out, g, at in zip(outputs, own, bound.layouts, strict=True)
            if g is not None and out.requires_grad  # another output may have nothing to do with this operand
        ]

        def vjp(masked: list[Tensor]) -> Tensor:
            (row,) = torch.autograd.grad(
                [out for out, _, _ in present], [leaf], masked,
                retain_graph=True, create_graph=create_graph, allow_unused=True,
            )  # fmt: skip
            return torch.zeros_like(operand) if row is None else row

        return Replay(
            lambda b: vjp([at.only(g, batch, b) for _, g, at in present]),
            (lambda w: vjp([at.scale(g, w) for _, g, at in present])) if _is_of_torch(bound.site.node) else None,
            range(batch), batch, tuple(operand.shape), operand.dtype,
        )  # fmt: skip


def _is_of_torch(node: fx.Node) -> bool:
    """Whether it is one of torch's own, whose backward is linear: a user's may clip or round what arrives at it."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _outputs(result: Any, site: Site) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [result[out.args[1]] for out in site.outputs]  # each output is a getitem of the operation
