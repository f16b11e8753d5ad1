"""The tables of rules and of pullbacks: one for each operand of each operation.

A rule is a function `rule(cotangent, *residuals, **statics) -> Factor`. Its positional parameters after
the first name the operation's arguments whose values it needs, its keyword-only ones the settings. The
cotangent and every batched residual arrive batch first, as (b, t, *rest): `rest` is the shape without its batch dimension,
and t counts what of that dimension belongs to one example (1 for a plain batch, T for a (B*T, ...) fold).

A pullback is a function `pullback(factor, *residuals, **statics) -> Factor | None` for an operation of parameter-only code:
from a factor of its result that of an operand, or None where that is none, or not worth it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from ..errors import InputError
from ..factors import Factor

RuleFunction = Callable[..., Factor]
PullbackFunction = Callable[..., Factor | None]

# keyword-only parameters that do not come from the operation: of the operand, of the activation, of the call
GIVEN = ("shape", "dtype", "batch_dim", "conv_rule")


@dataclass(frozen=True)
class Rule:
    """A rule, or a pullback, and what it needs from the forward pass."""

    function: Callable[..., Any]
    residuals: tuple[str, ...]
    statics: tuple[str, ...]
    batch_dim: int | None
    when: Callable[[dict[str, Any]], bool] | None = None

    @property
    def name(self) -> str:
        """The name of the rule's function."""
        return self.function.__name__


_rules: dict[tuple[OpOverload, str], Rule] = {}
_pullbacks: dict[tuple[OpOverload, str], Rule] = {}


def register_rule(
    operation: OpOverload, operand: str, *, batch_dim: int | None = None,
    when: Callable[[dict[str, Any]], bool] | None = None,
) -> Callable[[RuleFunction], RuleFunction]:  # fmt: skip
    """Register the decorated function as the rule for `operand` of `operation`; `tensors.1` is the second in a list.

    >>> @register_rule(torch.ops.aten.linear.default, "bias")
    ... def linear_bias(g, *, shape, dtype):  # g (b, t, *rest)
    ...     return Broadcast(g.flatten(1, -2), None, shape, dtype)

    Args:
        operation: an ATen operation, with its overload.
        operand: the argument, by its name in the schema, whose gradient the rule gives.
        batch_dim: the rule holds only where the activation has its batch on that dimension; elsewhere the exact fallback is used.
        when: likewise, only for calls whose arguments by name (in which nodes stand for tensors) it accepts.

    Raises:
        InputError: where the rule asks for an argument that the operation does not have.
    """

    def register(function: RuleFunction) -> RuleFunction:
        rule = as_rule(function, batch_dim, when)
        known = [a.name for a in operation._schema.arguments]
        unknown = [
            n
            for n in (operand.split(".")[0], *rule.residuals, *rule.statics)
            if n not in known and n not in GIVEN
        ]
        if unknown:
            raise InputError(f"{operation} has no argument {', '.join(unknown)}; it has {', '.join(known)}")
        _rules[operation, operand] = rule
        return function

    return register


def register_pullback(
    *operations: OpOverload, operand: str = "self"
) -> Callable[[PullbackFunction], PullbackFunction]:
    """Register the decorated function as the pullback to `operand` of operations that name their arguments alike."""

    def register(function: PullbackFunction) -> PullbackFunction:
        _pullbacks.update(dict.fromkeys(((o, operand) for o in operations), as_rule(function)))
        return function

    return register


def find_pullback(operation: Any, operand: str) -> Rule | None:
    """The pullback to this operand, if there is one."""
    return _pullbacks.get((operation, operand))


def as_rule(
    function: Callable[..., Any],
    batch_dim: int | None = None,
    when: Callable[[dict[str, Any]], bool] | None = None,
) -> Rule:
    """Read off a rule's signature what it needs."""
    kinds = inspect.signature(function).parameters.values()
    positional = [p.name for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = tuple(p.name for p in kinds if p.kind is p.KEYWORD_ONLY)
    return Rule(function, tuple(positional[1:]), keywords, batch_dim, when)


def find_rule(operation: Any, operand: str) -> Rule | None:
    """The rule for this operand, if there is one."""
    return _rules.get((operation, operand))


def registered() -> dict[tuple[OpOverload, str], Rule]:
    """Every rule, by operation and operand."""
    return dict(_rules)


@contextmanager
def replaced(operation: OpOverload, operand: str, function: RuleFunction | None) -> Iterator[None]:
    """Use another rule for an operand, or none, within a `with` block: for trying out and for testing."""
    before = _rules.pop((operation, operand), None)
    try:
        if function is not None:
            register_rule(
                operation, operand,
                batch_dim=before.batch_dim if before else None, when=before.when if before else None,
            )(function)  # fmt: skip
        yield
    finally:
        _rules.pop((operation, operand), None)
        if before is not None:
            _rules[operation, operand] = before
