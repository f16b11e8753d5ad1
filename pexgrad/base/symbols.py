"""Sizes that stand for any number, as the batch size does in a trace."""

from __future__ import annotations

from typing import Any

import sympy
import torch


def expression(size: Any) -> Any:
    """What a symbolic number is, in symbols; a number as it is."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def symbol_of(size: Any) -> Any:
    """The one symbol in a symbolic size."""
    (symbol,) = expression(size).free_symbols
    return symbol


def number(size: Any, symbol: Any, n: int) -> int:
    """What a size is where its symbol stands for n."""
    return int(sympy.sympify(expression(size)).subs(symbol, n))


def are_same(sizes: Any, others: Any) -> bool:
    """Whether sizes are equal by their form; a comparison of the symbolic ones would be noted as a condition."""
    return [*map(expression, sizes)] == [*map(expression, others)]
