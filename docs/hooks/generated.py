"""What the site takes from the code: the table of operations, and the pages that other programs write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

OPERATIONS = "<!-- table of operations -->"
OTHERS = "<!-- other public names -->"
# pages written from measurements: in the site where they exist
MEASURED = {"Benchmarks": "benchmarks.md", "Zoo": "zoo.md"}


def on_config(config: Any) -> Any:
    """Add the measured pages that exist to the navigation."""
    folder = Path(config["docs_dir"])
    config["nav"] += [{title: page} for title, page in MEASURED.items() if (folder / page).exists()]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what the page marks."""
    if OPERATIONS in markdown:
        markdown = markdown.replace(OPERATIONS, operations())
    if OTHERS in markdown:
        markdown = markdown.replace(OTHERS, others(markdown))
    return markdown


def others(markdown: str) -> str:
    """Entries for the public names that have none on the page and are not of a module that has one."""
    import pexgrad

    listed = set(re.findall(r"^::: pexgrad\.([\w.]+)", markdown, re.MULTILINE))
    public = {
        name: value.__module__.removeprefix("pexgrad.")
        for name, value in vars(pexgrad).items()
        if getattr(value, "__module__", "").startswith("pexgrad.")
    }
    missing = [name for name, module in public.items() if name not in listed and module not in listed]
    return "\n\n".join(["## More", *(f"::: pexgrad.{name}" for name in missing)]) if missing else ""


def operations() -> str:
    """A Markdown table of every registered rule, one line for each operation."""
    from pexgrad.extend import registered

    by_operation: dict[str, dict[str, str]] = {}
    for (operation, operand), rule in registered().items():
        by_operation.setdefault(str(operation), {})[operand] = f"`{rule.name}`"
    lines = ["| operation | operand | rule |", "|---|---|---|"]
    for operation, operands in sorted(by_operation.items()):
        names = ", ".join(f"`{operand}`" for operand in operands)
        lines.append(f"| `{operation}` | {names} | {', '.join(operands.values())} |")
    return "\n".join(lines)
