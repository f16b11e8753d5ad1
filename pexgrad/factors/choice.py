"""Which algorithm gives a convolution's rows fastest: a model of the cost, fitted to measurements, or a measurement.

The cost of an algorithm is a sum of amounts of work (calls, multiplications, numbers written) with a price each. The prices
of a kind of device are fitted by `python -m benchmarks fit`, which writes `prices.json`; where a kind has none, the
algorithms are measured, once for each shape.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

# multiplications are done in blocks of this many channels
LANES = 16


class Work(NamedTuple):
    """The sizes of a weight gradient: `outputs` and `inputs` are channels of one group, `kernel` and `positions` areas."""

    examples: int
    fold: int  # positions t of one example that were folded into the batch
    outputs: int
    inputs: int
    groups: int
    kernel: int
    positions: int
    pixels: int

    @property
    def channels(self) -> int:
        """Products of channels for each position and element of the kernel, in whole blocks; a colour image is not padded."""
        inputs = self.inputs if self._of_colours else _blocks(self.inputs)
        return self.groups * _blocks(self.outputs) * inputs

    @property
    def ragged(self) -> bool:
        """Whether channels do not fill half a block, for which the library has slower kernels."""
        channels = [self.outputs] if self._of_colours else [self.outputs, self.inputs]
        return any(n % (LANES // 2) for n in channels)

    @property
    def _of_colours(self) -> bool:
        return self.inputs <= 4 and self.groups == 1


def _blocks(n: int) -> int:
    return -(-n // LANES) * LANES


# numbers in the windows of one image that do not stay in a cache
MANY = 1 << 22


def amounts(work: Work, algorithm: str) -> tuple[float, ...]:
    """What an algorithm does for a convolution, each kind of it with a price of its own."""
    images = work.examples * work.fold
    one = work.groups * work.outputs * work.inputs * work.kernel
    places = images * work.positions
    copied = algorithm == "unfold" and work.kernel > 1  # windows of one element are x itself
    windows = work.groups * work.inputs * work.kernel * work.positions if copied else 0
    given = images * work.groups * (work.inputs * work.pixels + work.outputs * work.positions)
    return (
        {"loop": work.examples, "unfold": images * work.groups}.get(algorithm, 1),  # calls
        places * one,  # multiplications
        places * work.channels * work.kernel,  # the same of channels in whole blocks
        places * one * (work.ragged and algorithm in ("loop", "joint")),  # and of channels that fill none
        images * windows,  # numbers copied into windows
        images * windows * (windows > MANY),  # again, for images with many of them
        work.examples * one,  # numbers in rows
        given,  # numbers in x and g
    )


def candidates(work: Work, into_memory: bool) -> tuple[str, ...]:
    """The algorithms that may be fastest. No "joint" where rows go into large memory that is there: it fills as much again."""
    if work.fold != 1:
        return ("unfold", "loop")
    # else the library goes through the groups one by one
    fits = work.inputs % (LANES // 2) == work.outputs % (LANES // 2) == 0
    return ("unfold", "loop", "lower", "joint") if fits and not into_memory else ("unfold", "loop", "lower")


@cache
def prices(device: str) -> dict[str, tuple[float, ...]]:
    """algorithm -> seconds for one of each of its amounts; empty where nothing was fitted for this kind of device."""
    return json.loads(resources.files("pexgrad.factors").joinpath("prices.json").read_text()).get(device, {})


@cache
def by_model(work: Work, device: str, into_memory: bool) -> str:
    """The algorithm of the lowest cost by the model of a kind of device."""
    known = prices(device)
    cost = lambda name: sum(a * p for a, p in zip(amounts(work, name), known[name], strict=True))  # noqa: E731
    return min(candidates(work, into_memory), key=cost)


Measured = tuple[Work, bool, torch.device, torch.dtype, int]
_measured: dict[Measured, str] = {}


def _key(work: Work, like: Tensor, into_memory: bool) -> Measured:
    return work, into_memory, like.device, like.dtype, torch.get_num_threads()


def remembered(work: Work, like: Tensor, into_memory: bool) -> str | None:
    """What `by_measurement` found for tensors like the one given, if it was asked."""
    return _measured.get(_key(work, like, into_memory))


def by_measurement(work: Work, like: Tensor, into_memory: bool, rows: Callable[[str], Tensor]) -> str:
    """The algorithm whose `rows(name)` took the least time, on tensors like the one given; remembered."""
    key = _key(work, like, into_memory)
    if key not in _measured:
        names = candidates(work, into_memory)
        _measured[key] = min(names, key=lambda name: _seconds(lambda: rows(name), like.device))
    return _measured[key]


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """The least of three times, after a call that does not count."""
    times = []
    for _ in range(4):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
