"""`docs/zoo.md`, written from the JSON file and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]
PAGE = Path(__file__).parent.parent.parent / "docs" / "zoo.md"

INTRODUCTION = """# Zoo

<!-- Written by `python -m benchmarks.zoo` from `benchmarks/results/zoo.json`; edit neither by hand. -->

Unmodified models of torchvision, timm and transformers with random weights, in evaluation mode and float64, on batches of
two. **Exact** means that every entry of every row agrees with a loop over batches of one, by the original module and plain
autograd, to a relative error below 1e-8 a parameter. (Where that loop itself meets a fault of PyTorch, whose CPU batch norm has a wrong
backward at batch size 1 for some memory layouts, each example is taken twice and the gradient halved.) **Refused** means an error that says why; **wrong** a difference;
**crashed** any error that is not the library's own. Images have the smallest size the model takes; transformers come in
tiny configurations, timm's families by their smallest models, torchvision's in full (of the large ViTs four blocks).

A model whose *examples depend on one another* in an ordinary forward has no per-example gradients to get: a refusal is the
right answer there, and such models are not counted below.
"""


def write(data: Record) -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n\n".join(page(data)) + "\n")


def page(data: Record) -> Iterator[str]:
    records = {k: r for k, r in data["models"].items() if r["verdict"] != "unusable"}
    sources = list(dict.fromkeys(r["source"] for r in records.values()))
    yield INTRODUCTION.rstrip()
    yield versions(data)
    yield summary(records, sources)
    for source in sources:
        yield f"## {source}"
        yield table({k: r for k, r in records.items() if r["source"] == source})


def versions(data: Record) -> str:
    return "Versions: " + ", ".join(f"{k} {v}" for k, v in data["versions"].items()) + "."


def has_rows(r: Record) -> bool:
    return not r["mixes"] and not r.get("dependent")


def summary(records: dict[str, Record], sources: list[str]) -> str:
    lines = [
        "| | models | exact | refused | wrong | crashed | trace, median s | max s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for source in [*sources, "all"]:
        of = [r for r in records.values() if source in (r["source"], "all") and has_rows(r)]
        count = Counter(r["verdict"] for r in of)
        times = [r["trace_s"] for r in of if "trace_s" in r] or [0.0]
        numbers = [
            len(of),
            *(count[v] for v in ("exact", "refused", "wrong", "crashed")),
            f"{median(times):.1f}",
            f"{max(times):.1f}",
        ]
        lines.append(f"| {source} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def table(records: dict[str, Record]) -> str:
    lines = ["| family | model | parameters | result | trace, s | |", "|---|---|---|---|---|---|"]
    for name, r in sorted(records.items(), key=lambda kr: (kr[1]["family"], kr[0])):
        lines.append(
            f"| {r['family']} | {name.split('/', 1)[1]} | {size(r.get('parameters'))} | {r['verdict']} | {r.get('trace_s', '')} | {note(r)} |"
        )
    return "\n".join(lines)


def size(parameters: int | None) -> str:
    if parameters is None:
        return ""
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e5 else f"{parameters / 1e3:.0f} k"


def note(r: Record) -> str:
    notes = []
    if not has_rows(r):
        notes.append("its examples depend on one another")
    if r.get("fallback_sites"):
        notes.append(f"{r['fallback_sites']} uses by the exact fallback")
    if "why" in r:
        notes.append(r["why"].replace("|", "\\|").replace("\n", " ")[:300])
    return "; ".join(notes)
