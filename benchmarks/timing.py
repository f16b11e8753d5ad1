"""Clocks, and repetitions in which the contenders take turns, so that a slow minute of the machine hits all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable

import torch

Call = Callable[[], object]

WARM_UP_S = 1.0
SHORTEST_SAMPLE_S = 0.02
FEWEST_SAMPLES = 3


def clock(device: torch.device) -> Callable[[Call, int], float]:
    """`seconds(call, number)`: what one of `number` calls in a row takes, by CUDA events on a GPU."""
    return cuda_seconds if device.type == "cuda" else cpu_seconds


def cpu_seconds(call: Call, number: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def cuda_seconds(call: Call, number: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(number):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / number


def warm_up(call: Call, seconds: Callable[[Call, int], float]) -> None:
    """Calls for a second, at least one: what compiles, chooses or remembers has done so before it is timed."""
    spent = 0.0
    while spent < WARM_UP_S:
        spent += seconds(call, 1)


class Runner:
    """One contender's samples; a sample is as many calls in a row as last about 20 ms."""

    def __init__(self, name: str, call: Call, seconds: Callable[[Call, int], float]):
        self.name, self.call, self.seconds = name, call, seconds
        self.times: list[float] = []
        self.number = max(1, round(SHORTEST_SAMPLE_S / max(seconds(call, 1), 1e-6)))
        self.failure: Exception | None = None

    def wants_more(self, repeats: int, budget_s: float) -> bool:
        """Until `repeats` samples, or `budget_s` seconds in at least three of them."""
        spent = sum(self.times) * self.number
        overspent = spent > budget_s and len(self.times) >= FEWEST_SAMPLES
        return self.failure is None and len(self.times) < repeats and not overspent

    def sample(self) -> None:
        try:
            self.times.append(self.seconds(self.call, self.number))
        except Exception as failure:  # noqa: BLE001 - whatever a contender dies of is its result
            self.failure = failure.with_traceback(None)  # whose frames would hold the memory


def interleave(runners: list[Runner], repeats: int, budget_s: float, progress: Callable[[str], None]) -> None:
    """Rounds in which each runner takes one sample, each round starting one runner later."""
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            for runner in rotated(runners, turn):
                if runner.wants_more(repeats, budget_s):
                    progress(runner.name)
                    runner.sample()
            gc.collect()
    finally:
        gc.enable()


def rotated(items: list, by: int) -> Iterable:
    by %= max(len(items), 1)
    return items[by:] + items[:by]


def summary(times: list[float]) -> dict[str, object]:
    """Median and quartiles, in seconds."""
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median": median, "quartiles": [low, high], "samples": len(times)}
