"""The equations of `einsum`."""

from __future__ import annotations

import string
from collections.abc import Sequence


def parse(equation: str) -> tuple[list[str], str]:
    """The letters of each operand, and those of the result: where they are left out, those that occur once, sorted."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        out = "..." if "..." in left else ""
        out += "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return left.split(","), out


def written_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The same with letters in the place of ellipses, for operands of so many dimensions."""
    terms, out = parse(equation)
    free = [c for c in string.ascii_letters if c not in equation]
    hidden = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    most = max([n for n, term in zip(hidden, terms, strict=True) if "..." in term], default=0)
    stands = "".join(free[:most])  # an operand with fewer dimensions has the last of them
    inputs = [term.replace("...", stands[most - n :]) for n, term in zip(hidden, terms, strict=True)]
    return inputs, out.replace("...", stands)
