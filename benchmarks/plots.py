"""Plots: the paper's figures with every contender's curve, and bars of times over the ordinary backward."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.tables import contenders_of, times_plain

Record = dict[str, Any]

BATCHES = 20  # the paper's figures are seconds for 20 batches
COLORS = {
    "plain": "0.6",
    "naive": "C7",
    "multi": "C1",
    "crb grouped": "C0",
    "crb": "C3",
    "crb out=": "C6",
    "vmap(grad)": "C2",
    "Opacus": "C4",
    "Opacus ghost": "#4b2a78",
    "BackPACK": "C5",
    "ExpandedWeights": "C9",
    "JAX vmap(grad)+jit": "C8",
}
DRAWN = {"fig1": "rate", "fig2": "batch", "fig3": "rate"}
STYLE = {"svg.hashsalt": "pexgrad", "axes.spines.top": False, "axes.spines.right": False, "font.size": 9}


def draw(data: Record, path: Path) -> bool:
    """Writes the plot of a result file, if its experiment has one."""
    points = list(data["points"].values())
    with plt.rc_context(STYLE):
        if not points or data["experiment"] in ("first-call", "check"):
            return False
        if axis := DRAWN.get(data["experiment"]):
            figure = curves(panels(points), axis, BATCHES, f"seconds for {BATCHES} batches")
        elif data["experiment"] == "scaling":
            figure = curves(scaling_panels(points), None, 1, "seconds a batch", log=True)
        else:
            figure = bars(points)
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
    return True


def panels(points: list[Record]) -> dict[str, list[Record]]:
    """As in the paper: a panel for each number of layers."""
    if "layers" not in points[0]["axes"]:
        return {"": points}
    depths = sorted({p["axes"]["layers"] for p in points})
    return {f"{d} convolutional layers": [p for p in points if p["axes"]["layers"] == d] for d in depths}


def scaling_panels(points: list[Record]) -> dict[str, list[Record]]:
    kinds = dict.fromkeys((p["work"], axis) for p in points for axis in p["axes"])
    return {
        f"{work} over {axis}": [p for p in points if p["work"] == work and axis in p["axes"]]
        for work, axis in kinds
    }


def curves(
    groups: dict[str, list[Record]], axis: str | None, times: int, ylabel: str, log: bool = False
) -> plt.Figure:
    columns = min(len(groups), 4)
    rows = -(-len(groups) // columns)
    size = (3.4 * columns + 1.8, 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax, (title, points) in zip(axes.flat, groups.items(), strict=False):
        name = axis or next(iter(points[0]["axes"]))
        for contender in contenders_of(points):
            curve(ax, contender, name, points, times)
        ax.set(title=title, xlabel={"rate": "channel rate", "batch": "batch size"}.get(name, name))
        if log:
            log_axes(ax, sorted({p["axes"][name] for p in points}))
    for ax in axes[:, 0]:
        ax.set_ylabel(ylabel)
    for ax in list(axes.flat)[len(groups) :]:
        ax.remove()
    legend(figure, axes.flat)
    return figure


def log_axes(ax: plt.Axes, ticks: list[float]) -> None:
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)


def curve(ax: plt.Axes, contender: str, axis: str, points: list[Record], times: int) -> None:
    ran = [p for p in points if "median" in p["contenders"].get(contender, {})]
    ran.sort(key=lambda p: p["axes"][axis])
    if not ran:
        return
    records = [p["contenders"][contender] for p in ran]
    middle = [times * r["median"] for r in records]
    spread = [
        [abs(times * r["quartiles"][side] - m) for r, m in zip(records, middle, strict=True)]
        for side in (0, 1)
    ]
    style = {"color": COLORS.get(contender), "linestyle": "--" if contender == "plain" else "-"}
    x = [p["axes"][axis] for p in ran]
    ax.errorbar(x, middle, yerr=spread, marker="o", markersize=3, linewidth=1, label=contender, **style)


def legend(figure: plt.Figure, axes: Iterable[plt.Axes]) -> None:
    """One legend for all panels, right of them."""
    entries = {
        text: handle for ax in axes for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", frameon=False)


def bars(points: list[Record]) -> plt.Figure:
    """A panel for each kind of work: every contender's time over the ordinary backward's, by case."""
    works = list(dict.fromkeys(p["work"] for p in points))
    heights = [len([p for p in points if p["work"] == w]) for w in works]
    size = (8, 0.6 + 0.85 * sum(heights))
    figure, axes = plt.subplots(
        len(works), 1, figsize=size, height_ratios=heights, squeeze=False, layout="constrained"
    )
    for ax, work in zip(axes.flat, works, strict=True):
        bars_of([p for p in points if p["work"] == work], ax)
        ax.set_title(work, loc="left")
    axes[-1, 0].set_xlabel("time over the ordinary backward's")
    legend(figure, axes.flat)
    return figure


def bars_of(points: list[Record], ax: plt.Axes) -> None:
    names = [n for n in contenders_of(points) if n != "plain"]
    height = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        found = [(y, t) for y, p in enumerate(points) if (t := relative(p, name)) is not None]
        if found:
            y, times = zip(*found, strict=True)
            ax.barh([v + i * height for v in y], times, height, label=name, color=COLORS.get(name))
    ax.set_yticks(
        [y + 0.4 - height / 2 for y in range(len(points))], [f"{p['case']}, B={p['batch']}" for p in points]
    )
    ax.axvline(1, color="0.5", linewidth=0.8)
    ax.set_xscale("log")
    ax.invert_yaxis()


def relative(point: Record, name: str) -> float | None:
    record = point["contenders"].get(name, {})
    return times_plain(point, record) if "median" in record else None
