"""What the paper published, and its conclusions as tests on measured points.

Rochette, Manoel & Tramel 2019 (arXiv 1912.06015), Table 1: seconds for 20 batches on an NVIDIA P100 with PyTorch 1.1,
3 x 256 x 256 inputs. They time whole steps of differentially private training (rows, clipping, noise, update); here
the rows alone are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TABLE1 = {
    "AlexNet": {"batch": 16, "plain": 0.747, "naive": 30.17, "crb grouped": 2.030, "multi": 3.076},
    "VGG16": {"batch": 8, "plain": 1.947, "naive": 37.20, "crb grouped": 5.591, "multi": 4.630},
}
STRATEGIES = ("naive", "crb grouped", "multi")

Times = Callable[..., float | None]
Verdict = tuple[bool, str] | None
CONCLUSIONS: list[tuple[str, str, Callable[[Times], Verdict]]] = []


def ratio(model: str, strategy: str) -> float:
    """How many times the ordinary backward a strategy took in the paper."""
    return TABLE1[model][strategy] / TABLE1[model]["plain"]


def times_of(points: list[dict[str, Any]]) -> Times:
    """`times(contender, name="AlexNet", rate=4, ...)`: the median seconds of a batch's rows, if measured."""

    def times(contender: str, name: str = "", **axes: float) -> float | None:
        for point in points:
            fits = point["case"].startswith(name) and axes.items() <= point["axes"].items()
            if fits and point["work"] == "rows":
                return point["contenders"].get(contender, {}).get("median")
        return None

    return times


def conclusion(
    experiment: str, text: str
) -> Callable[[Callable[[Times], Verdict]], Callable[[Times], Verdict]]:
    """Registers a test of `text`: given the times, whether it holds and by which numbers; None where not measured."""

    def register(test: Callable[[Times], Verdict]) -> Callable[[Times], Verdict]:
        CONCLUSIONS.append((experiment, text, test))
        return test

    return register


def quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


@conclusion("table1", "On AlexNet `crb` is up to fifteen times as fast as `naive`.")
def _(times: Times) -> Verdict:
    speedup = quotient(times("naive", "AlexNet"), times("crb grouped", "AlexNet"))
    return speedup and (speedup > 7.5, f"{speedup:.1f} times as fast (paper: 14.9)")


@conclusion("table1", "On AlexNet `crb` is somewhat faster than `multi`.")
def _(times: Times) -> Verdict:
    speedup = quotient(times("multi", "AlexNet"), times("crb grouped", "AlexNet"))
    return speedup and (speedup > 1, f"`multi` takes {speedup:.2f} times as long (paper: 1.52)")


@conclusion("table1", "On VGG16 `crb` is somewhat slower than `multi`.")
def _(times: Times) -> Verdict:
    slowdown = quotient(times("crb grouped", "VGG16"), times("multi", "VGG16"))
    return slowdown and (slowdown > 1, f"`crb` takes {slowdown:.2f} times as long (paper: 1.21)")


@conclusion("fig1", "In shallow networks `crb` gains on `multi` as the channel rate grows.")
def _(times: Times) -> Verdict:
    ends = [crb_advantage(times, layers=2, rate=rate) for rate in (1, 16)]
    return from_to(ends, "from rate 1 to 16 at 2 layers")


@conclusion("fig1", "More layers favour `multi`.")
def _(times: Times) -> Verdict:
    ends = [crb_advantage(times, layers=layers, rate=4) for layers in (4, 2)]
    return from_to(ends, "from 4 layers to 2, at rate 4")


@conclusion("fig2", "`naive` and `multi` are linear in the batch size, the slope of `crb` falls.")
def _(times: Times) -> Verdict:
    ends = [crb_advantage(times, batch=batch) for batch in (3, 15)]
    return from_to(ends, "from batch 3 to 15")


@conclusion("fig3", "A larger kernel (5 instead of 3) favours `crb`.")
def _(times: Times) -> Verdict:
    ends = [crb_advantage(times, f"toy CNN, 2 layers, rate 8, kernel {kernel}") for kernel in (3, 5)]
    return from_to(ends, "from kernel 3 to 5, at 2 layers and rate 8")


def crb_advantage(times: Times, name: str = "", **axes: float) -> float | None:
    return quotient(times("multi", name, **axes), times("crb grouped", name, **axes))


def from_to(ends: list[float | None], where: str) -> Verdict:
    """Whether `multi` / `crb` grows."""
    first, last = ends
    if first is None or last is None:
        return None
    return last > first, f"time of `multi` over time of `crb` goes from {first:.2f} to {last:.2f} {where}"
