"""Stage 4: for each operand of each site, the rule that gives its factor and the values that the rule needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..base.nodes import batch_dims, draws, fold_factor_of, nodes_in, value, where
from ..errors import ANY_MODEL, MixedExamplesError, TraceError
from ..rules.registry import Rule, find_rule
from .sites import Operand, Site


@dataclass(frozen=True, eq=False)
class Use:
    """An operand with its rule; no rule means the exact fallback, which replays the operation."""

    operand: Operand
    rule: Rule | None

    def needs(self, site: Site) -> tuple[fx.Node, ...]:
        """The forward values that evaluating this use takes."""
        if self.rule is None:
            return tuple(site.node.all_input_nodes)
        names = (*self.rule.residuals, *self.rule.statics)
        return tuple(nodes_in([site.arguments.get(name) for name in names]))


def plan_site(site: Site, symbol: Any) -> list[Use]:
    """Choose a rule, or the fallback, for each operand."""
    for out in site.outputs:
        if not batch_dims(value(out), symbol) or fold_factor_of(value(out), symbol) is None:
            raise MixedExamplesError(
                f"{where(site.node)} meets parameters {_params(site)} with a value of shape {tuple(value(out).shape)}, in which "
                "the batch is not one dimension of its own, so the examples cannot be told apart there"
            )
    return [Use(o, _rule(site, o, symbol)) for o in site.operands]


def _rule(site: Site, operand: Operand, symbol: Any) -> Rule | None:
    rule = find_rule(site.node.target, operand.name)
    if rule is not None and _fits(rule, site, symbol):
        return rule
    if _draws_anew(site):
        raise TraceError(
            f"{where(site.node)} draws random numbers and takes parameters {_params(site)}; {ANY_MODEL}"
        )
    return None


def _draws_anew(site: Site) -> bool:
    """Whether the operation draws random numbers at these settings, so that replaying it would draw others."""
    if not draws(site.node.target):
        return False
    chances = [site.arguments[k] for k in ("dropout_p", "dropout", "p") if k in site.arguments]
    training = [site.arguments[k] for k in ("training", "train") if k in site.arguments]
    return not (chances and 0 in chances) and not (training and not any(training))


def _fits(rule: Rule, site: Site, symbol: Any) -> bool:
    """Whether the batch is where the rule can take it."""
    if len(site.outputs) != 1:
        return False
    out = value(site.outputs[0])
    if rule.batch_dim is not None and batch_dims(out, symbol) != (rule.batch_dim,):
        return False
    if rule.when is not None and not rule.when(site.arguments):
        return False
    fold = fold_factor_of(out, symbol)
    residuals = [value(n) for n in nodes_in([site.arguments.get(name) for name in rule.residuals])]
    batched = [r for r in residuals if isinstance(r, Tensor) and batch_dims(r, symbol)]
    return all(fold_factor_of(r, symbol) in (1, fold) for r in batched)


def _params(site: Site) -> str:
    return ", ".join(sorted({p for o in site.operands for p in o.params}))


def nodes_needed(uses: list[Use], site: Site) -> Iterator[fx.Node]:
    """All forward values that the uses of a site take, each once."""
    yield from dict.fromkeys(n for use in uses for n in use.needs(site))
