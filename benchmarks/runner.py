"""Measuring a point: check each contender against the loop, take its peak memory, then time all of them in turns."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache

import torch
from tqdm import tqdm

from benchmarks import memory, timing
from benchmarks.contenders import CONTENDERS, reason
from benchmarks.experiments import EXPERIMENTS, Point
from benchmarks.models import mlp
from benchmarks.problems import Problem, pose
from benchmarks.reference import check
from benchmarks.results import Record, Results


@dataclass(frozen=True)
class Options:
    device: torch.device
    size: str
    repeats: int = 10
    budget_s: float = 20.0
    minutes: float = float("inf")
    only: tuple[str, ...] = ()
    keep: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def tolerance(self) -> float:
        """What float32 may differ by: an activation that rounding moves across a ReLU's kink changes a row of a deep network
        by a hundredth in every contender alike; TF32 keeps 10 bits.
        """
        return 3e-2 if self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 else 1.5e-2

    def out_of_time(self) -> bool:
        return time.monotonic() - self.started > 60 * self.minutes

    def wanted(self, point: Point, work: str) -> list[str]:
        """The contenders to measure, and always the ordinary backward beside them."""
        chosen = [name for name in point.work[work] if self.matches(f"{point.key(work)} | {name}")]
        return list(dict.fromkeys(["plain", *chosen])) if chosen else []

    def matches(self, text: str) -> bool:
        """Whether each pattern, or one of its alternatives between commas, is in the text."""
        return all(any(part in text.lower() for part in alternatives(pattern)) for pattern in self.only)


def alternatives(pattern: str) -> list[str]:
    return [part for part in pattern.lower().split(",") if part]


def run(name: str, results: Results, options: Options) -> dict[str, Record]:
    """Measure what is missing; the points asked for. Some contenders alone are a look at them: it is not kept."""
    wanted = [
        (point, work, names)
        for point in EXPERIMENTS[name].points(options.size)
        for work in point.work
        if (names := options.wanted(point, work))
    ]
    todo = [entry for entry in wanted if not results.measured(entry[0].key(entry[1]), entry[2], options.keep)]
    looks: dict[str, Record] = {}
    measure = measure_first_call if name == "first-call" else measure_in_turns
    with tqdm(total=sum(len(names) for *_, names in todo), desc=name, unit="contender") as bar:
        for point, work, names in todo:
            if options.out_of_time():
                bar.write(f"{name}: time is up; the same command goes on from here")
                break
            bar.write(point.key(work))
            record = facts(point, work) | measure(point, work, names, options, bar)
            if len(names) == len(point.work[work]):
                results.add(point.key(work), record)
            else:
                looks[point.key(work)] = record
    known = results.data["points"] | looks
    return {key: known[key] for point, work, _ in wanted if (key := point.key(work)) in known}


def facts(point: Point, work: str) -> Record:
    """What a point is, beside its numbers."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return {"case": point.case.name, "batch": point.batch, "work": work, "axes": point.axes, "measured": when}


def measure_in_turns(point: Point, work: str, names: list[str], options: Options, bar: tqdm) -> Record:
    problem = pose(point.case, point.batch, options.device)
    records: Record = {}
    runners = []
    for name in names:
        bar.set_postfix_str(f"{name}: checking")
        records[name], runner = prepare(name, problem, work, options)
        runners += [runner] if runner else []
        bar.update()

    def show(name: str) -> None:
        bar.set_postfix_str(f"{name}: timing")

    timing.interleave(runners, options.repeats, options.budget_s, show)
    for runner in runners:
        records[runner.name] |= outcome(runner)
    return {"row_bytes": sum(p.nbytes for p in problem.params.values()), "contenders": records}


def outcome(runner: timing.Runner) -> Record:
    return {"why": reason(runner.failure)} if runner.failure else timing.summary(runner.times)


def prepare(name: str, problem: Problem, work: str, options: Options) -> tuple[Record, timing.Runner | None]:
    """Check and warm up; the record so far, and what is to be timed if the contender passed."""
    try:
        call = CONTENDERS[name](problem, work)
        error = check("sum" if name == "plain" else work, call(), problem.reference, options.tolerance)
        seconds = timing.clock(options.device)
        timing.warm_up(call, seconds)
        held = getattr(call, "held_bytes", 0)
        used = None if unseen(name, options.device) else memory.peak(call, options.device)
        runner = timing.Runner(name, call, seconds)
    except Exception as failure:  # noqa: BLE001 - whatever a contender dies of is its result
        clean(options.device)
        return {"why": reason(failure)}, None
    return {"error": error, "peak_bytes": None if used is None else used + held}, runner


def unseen(name: str, device: torch.device) -> bool:
    """Whether PyTorch's allocator does not see this contender's memory."""
    return device.type == "cuda" and name.startswith("JAX")


def measure_first_call(point: Point, work: str, names: list[str], options: Options, bar: tqdm) -> Record:
    problems = [pose(point.case, batch, options.device) for batch in (point.batch, point.batch + 1)]
    records: Record = {}
    for name in names:
        bar.set_postfix_str(name)
        try:
            records[name] = first_calls(name, problems, work, options)
        except Exception as failure:  # noqa: BLE001 - whatever a contender dies of is its result
            records[name] = {"why": reason(failure)}
        clean(options.device)
        bar.update()
    return {"contenders": records}


def first_calls(name: str, problems: list[Problem], work: str, options: Options) -> Record:
    """Seconds to prepare and call once; then for the first call at a new batch size; then for one after that."""
    warm_up(name, options.device)
    seconds = timing.clock(options.device)
    problem, other = problems[0].copy(), problems[1]
    calls: list[timing.Call] = []
    first = seconds(lambda: calls.append(CONTENDERS[name](problem, work)), 1) + seconds(lambda: calls[0](), 1)
    problem.x, problem.y = other.x, other.y
    at_new_batch = seconds(calls[0], 1)
    return {"first": first, "new batch": at_new_batch, "later": min(seconds(calls[0], 1) for _ in range(3))}


@cache
def warm_up(name: str, device: torch.device) -> None:
    """Imports, and what a process does once on a device, are not a model's first call."""
    CONTENDERS[name](pose(mlp(32), 2, device), "rows")()


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
