"""The prices behind `conv_rule="auto"`: time every algorithm on many shapes, and fit the cost model of `factors/choice.py`.

    python -m benchmarks fit [--device cpu|cuda]

writes the measurements to `results/` and the prices into the package.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares, nnls
from tqdm import tqdm

import pexgrad.factors.choice as choice
from benchmarks.environment import describe
from benchmarks.timing import clock
from pexgrad.factors import Conv, Geometry
from pexgrad.factors.convolving import convolve

PRICES = Path(choice.__file__).with_name("prices.json")
ALGORITHMS = ("unfold", "loop", "lower", "joint")
REPEATS = 7

SHAPES = [  # (batch, in, size, out, kernel, stride, groups)
    (8, 3, 64, 25, 3, 1, 1), (8, 25, 64, 50, 3, 1, 1), (8, 50, 32, 100, 3, 1, 1), (16, 3, 224, 64, 11, 4, 1),
    (16, 64, 27, 192, 5, 1, 1), (16, 192, 13, 384, 3, 1, 1), (16, 384, 13, 256, 3, 1, 1), (4, 64, 128, 64, 3, 1, 1),
    (4, 3, 128, 64, 3, 1, 1), (4, 128, 64, 128, 3, 1, 1), (4, 256, 32, 256, 3, 1, 1), (4, 512, 16, 512, 3, 1, 1),
    (4, 512, 8, 512, 3, 1, 1), (8, 3, 96, 64, 7, 2, 1), (8, 64, 24, 64, 3, 1, 1), (8, 64, 24, 128, 3, 2, 1),
    (8, 128, 12, 128, 3, 1, 1), (8, 256, 6, 256, 3, 1, 1), (8, 64, 24, 128, 1, 2, 1), (8, 256, 24, 64, 1, 1, 1),
    (64, 1, 28, 16, 3, 1, 1), (64, 16, 28, 32, 3, 1, 1), (64, 32, 14, 64, 3, 1, 1), (64, 64, 14, 64, 1, 1, 1),
    (32, 64, 32, 64, 3, 1, 64), (4, 96, 24, 96, 7, 1, 96), (4, 192, 12, 192, 7, 1, 192), (4, 384, 6, 384, 7, 1, 384),
    (32, 3, 32, 32, 5, 1, 1), (32, 32, 16, 64, 5, 1, 1), (256, 1, 28, 16, 5, 1, 1), (8, 64, 16, 64, 3, 1, 4),
    (8, 128, 28, 128, 3, 1, 32), (16, 8, 64, 8, 3, 1, 1), (2, 16, 128, 32, 3, 1, 1), (1, 64, 56, 64, 3, 1, 1),
    (4, 3, 96, 96, 4, 4, 1), (8, 3, 112, 384, 16, 16, 1), (128, 4, 8, 8, 3, 1, 1), (16, 32, 20, 32, 3, 2, 1),
    (8, 25, 62, 200, 3, 1, 1), (8, 100, 30, 400, 3, 1, 1), (8, 156, 30, 390, 3, 1, 1), (8, 25, 60, 200, 5, 1, 1),
    (8, 125, 30, 625, 3, 1, 1), (8, 75, 30, 225, 5, 1, 1), (64, 16, 13, 32, 4, 2, 1), (8, 64, 60, 64, 5, 1, 1),
    (8, 25, 66, 25, 3, 1, 1), (64, 25, 34, 25, 3, 1, 1), (8, 25, 34, 25, 3, 1, 1), (8, 25, 66, 50, 3, 1, 1),
    (8, 62, 35, 156, 3, 1, 1), (8, 25, 66, 75, 3, 1, 1), (8, 81, 35, 264, 3, 1, 1), (8, 50, 64, 200, 5, 1, 1),
    (8, 24, 40, 40, 3, 1, 1), (16, 40, 28, 72, 3, 1, 1), (8, 25, 32, 25, 5, 1, 1), (16, 20, 30, 50, 5, 1, 1),
    (32, 6, 14, 16, 5, 1, 1), (16, 48, 28, 48, 3, 1, 1), (8, 100, 16, 100, 3, 1, 1), (8, 33, 48, 33, 3, 2, 1),
]  # fmt: skip


def run_fit(device: torch.device, path: Path) -> None:
    """Measure, fit, write, and say how much slower than the best the model's choices are."""
    torch.manual_seed(0)
    measured = [measure(shape, device) for shape in tqdm(SHAPES, unit="shape")]
    known = json.loads(PRICES.read_text()) | {device.type: fit(measured)}
    PRICES.write_text(json.dumps(known, indent=1) + "\n")
    choice.prices.cache_clear()
    choice.by_model.cache_clear()
    for point in measured:
        point["chosen"] = choice.by_model(choice.Work(**point["work"]), device.type, into_memory=False)
    ratios = [point["seconds"][point["chosen"]] / min(point["seconds"].values()) for point in measured]
    mean, worst = statistics.geometric_mean(ratios), max(ratios)
    summary = f"The choice takes {mean:.2f} times the best on the geometric mean, {worst:.2f} times at worst."
    print(summary)
    environment = describe(device)
    data = {
        "experiment": "fit", "device": environment["device"], "environment": environment, "summary": summary,
        "points": measured,
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")


def measure(shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Median seconds of each algorithm for one shape, in turns, into a buffer where it takes one."""
    factor, seconds = make(shape, device), clock(device)
    buffer = factor._rows_by("unfold", None)
    outs = dict.fromkeys(choice.candidates(factor.work(), into_memory=True), buffer)
    candidates = choice.candidates(factor.work(), into_memory=False)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(REPEATS + 1):
        for name, found in times.items():
            found.append(seconds(lambda name=name: factor._rows_by(name, outs.get(name)), 1))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    return {"shape": shape, "work": factor.work()._asdict(), "seconds": medians}


def make(shape: tuple[int, ...], device: torch.device) -> Conv:
    """The weight's factor of a convolution, with random numbers."""
    b, c, size, d, k, stride, groups = shape
    padding = k // 2 if stride < k else 0
    geometry = Geometry((k, k), (stride, stride), (padding, padding), (1, 1), groups)
    weight = torch.randn(d, c // groups, k, k, device=device)
    x = torch.randn(b, c, size, size, device=device)
    g = torch.randn_like(convolve(x, weight, geometry))
    return Conv(x[:, None], g[:, None], geometry, tuple(weight.shape), torch.float32)


def fit(measured: list[dict[str, Any]]) -> dict[str, list[float]]:
    """For each algorithm, prices with the least relative error, too much and too little counted alike."""
    found = {}
    for name in ALGORITHMS:
        points = [p for p in measured if name in p["seconds"]]
        work = np.array([choice.amounts(choice.Work(**p["work"]), name) for p in points], float)
        seconds = np.array([p["seconds"][name] for p in points])
        used = work.any(0)
        prices = np.zeros(work.shape[1])
        prices[used] = fit_prices(work[:, used], seconds)
        found[name] = [float(f"{price:.3g}") if price > 1e-20 else 0.0 for price in prices]
    return found


def fit_prices(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Positive prices (k,) so that the logarithm of work (n, k) times prices is near that of the seconds (n,)."""
    scale = work.max(0)
    work = work / scale
    start, _ = nnls(work / seconds[:, None], np.ones(len(seconds)))
    found = least_squares(
        lambda logs: np.log(work @ np.exp(logs)) - np.log(seconds), np.log(np.maximum(start, 1e-7))
    )
    return np.exp(found.x) / scale
