"""The equations of `einsum`."""

from __future__ import annotations


def parse(equation: str) -> tuple[list[str], str]:
    """The letters of each operand, and those of the result: where they are left out, those that occur once, sorted."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        out = "..." if "..." in left else ""
        out += "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return left.split(","), out
