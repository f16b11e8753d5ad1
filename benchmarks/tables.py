"""Tables in Markdown: one line a point, one column a contender, the reasons of those that refused below."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

OURS = ("crb", "crb out=", "crb grouped", "crb unfold", "crb loop", "multi", "naive")
LARGE_ERROR = 1e-4

Record = dict[str, Any]


def tables(experiment: str, points: list[Record]) -> str:
    """All tables of one experiment, by kind of work."""
    if experiment == "first-call":
        return first_call_table(points)
    works = list(dict.fromkeys(point["work"] for point in points))
    return "\n\n".join(work_tables([p for p in points if p["work"] == work], work) for work in works)


def work_tables(points: list[Record], work: str) -> str:
    parts = [
        f"**{work}**: milliseconds, median ± half the interquartile range; in brackets, times the ordinary backward.",
        cells_table(points, time_cell),
        headline(points),
        f"Peak memory of a call ({work}), MB.",
        cells_table(points, memory_cell),
    ]
    return "\n\n".join(part for part in parts if part)


def markdown(header: list[str], lines: Iterable[list[str]]) -> str:
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])


def contenders_of(points: list[Record]) -> list[str]:
    return list(dict.fromkeys(name for point in points for name in point["contenders"]))


def label(point: Record) -> str:
    return f"{point['case']}, B={point['batch']}"


Cell = Callable[[Record, str, Record, "Notes"], str]


class Notes:
    """Numbered remarks below a table, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def __str__(self) -> str:
        return "\n".join(f"{i}. {text}" for i, text in enumerate(self.texts, 1))


def cells_table(points: list[Record], cell: Cell) -> str:
    names, notes = contenders_of(points), Notes()
    lines = [
        [label(p), *(cell(p, n, p["contenders"][n], notes) if n in p["contenders"] else "" for n in names)]
        for p in points
    ]
    return "\n\n".join(part for part in (markdown(["", *names], lines), str(notes)) if part)


def time_cell(point: Record, name: str, record: Record, notes: Notes) -> str:
    if "why" in record:
        return f"— {notes.mark(record['why'])}"
    text = f"{milliseconds(record['median'])} ± {milliseconds(half_spread(record))}"
    if name != "plain" and (times := times_plain(point, record)):
        text += f" ({times:.2f})"
    if name != "plain" and record["median"] == fastest(point):
        text = f"**{text}**"
    if record["error"] > LARGE_ERROR:
        text += " " + notes.mark(f"its relative error is {record['error']:.0e}")
    return text


def memory_cell(point: Record, name: str, record: Record, notes: Notes) -> str:
    used = record.get("peak_bytes")
    return "—" if used is None else f"{used / 1e6:,.0f}"


def milliseconds(seconds: float) -> str:
    """Three digits."""
    ms = 1e3 * seconds
    digits = max(0, 2 - math.floor(math.log10(ms))) if ms > 0 else 0
    return f"{ms:,.{min(digits, 3)}f}"


def half_spread(record: Record) -> float:
    low, high = record["quartiles"]
    return (high - low) / 2


def median(point: Record, name: str) -> float | None:
    return point["contenders"].get(name, {}).get("median")


def times_plain(point: Record, record: Record) -> float | None:
    plain = median(point, "plain")
    return record["median"] / plain if plain else None


def fastest(point: Record) -> float | None:
    return min(
        (r["median"] for n, r in point["contenders"].items() if n != "plain" and "median" in r), default=None
    )


def best_peer(point: Record) -> tuple[str, float] | None:
    """The fastest contender that is not this library."""
    peers = {
        n: r["median"] for n, r in point["contenders"].items() if n not in (*OURS, "plain") and "median" in r
    }
    return min(peers.items(), key=lambda item: item[1]) if peers else None


# ---------------------------------------------------------------- this library beside the best peer


HEADLINE = (
    "crb / plain",
    "best peer / plain",
    "crb / best peer",
    "crb out= / best peer",
    "crb memory beyond the answer / plain memory",
)


def headline(points: list[Record]) -> str:
    """One line a point: `crb` (and `crb out=`) over the ordinary backward and over the best peer."""
    lines = [(label(p), *headline_of(p)) for p in points if median(p, "crb") or best_peer(p)]
    if not lines:
        return ""
    columns = list(zip(*lines, strict=True))[2:]
    means = ["geometric mean", "", *(ratio(geometric_mean([v for v in c if v])) for c in columns)]
    texts = [[point, peer, *map(ratio, numbers)] for point, peer, *numbers in lines]
    return markdown(["", "best peer", *HEADLINE], [*texts, means])


def headline_of(point: Record) -> tuple[Any, ...]:
    plain, crb, out = (median(point, name) for name in ("plain", "crb", "crb out="))
    name, best = best_peer(point) or ("none runs", None)
    return name, over(crb, plain), over(best, plain), over(crb, best), over(out, best), memory_beyond(point)


def memory_beyond(point: Record) -> float | None:
    """Peak memory of `crb` without the rows, where these are asked for, over the ordinary backward's."""
    crb, plain = (point["contenders"].get(name, {}).get("peak_bytes") for name in ("crb", "plain"))
    if crb is None or not plain:
        return None
    return max(crb - (point["batch"] * point["row_bytes"] if point["work"] == "rows" else 0), 0) / plain


def over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def ratio(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


# ---------------------------------------------------------------- the first call


def first_call_table(points: list[Record]) -> str:
    about = "Milliseconds: first call / first call at a new batch size / a later call."
    return f"{about}\n\n{cells_table(points, first_call_cell)}"


def first_call_cell(point: Record, name: str, record: Record, notes: Notes) -> str:
    if "why" in record:
        return f"— {notes.mark(record['why'])}"
    return " / ".join(milliseconds(record[moment]) for moment in ("first", "new batch", "later"))
