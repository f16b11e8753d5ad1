"""The loop, one example at a time with plain autograd: the definition that every contender is checked against.

It keeps no rows: rows are checked as they are computed, so the check needs one gradient's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.problems import Problem

Gradient = dict[str, Tensor]
CHECKED_ROWS = 16


class WrongAnswer(Exception):
    """A contender's answer is not the loop's."""


class Loop:
    """What the loop says about a problem; norms and sums are computed once, when first asked for."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def gradients(self, examples: Iterable[int]) -> Iterator[Gradient]:
        params = self.problem.params
        for b in examples:
            loss = self.problem.losses(
                self.problem.model(self.problem.x[b : b + 1]), self.problem.y[b : b + 1]
            )
            grads = torch.autograd.grad(loss.sum(), list(params.values()), materialize_grads=True)
            yield dict(zip(params, grads, strict=True))

    @cached_property
    def norms_and_total(self) -> tuple[Tensor, Gradient]:
        """The norm of each gradient, and their sum."""
        norms: list[Tensor] = []

        def one(gradient: Gradient) -> float:
            norms.append(norm(gradient))
            return 1.0

        total = self.weighted_sum(one)
        return torch.stack(norms), total

    @property
    def norms(self) -> Tensor:
        return self.norms_and_total[0]

    @property
    def total(self) -> Gradient:
        return self.norms_and_total[1]

    @cached_property
    def clipped(self) -> Gradient:
        weights = iter((self.problem.max_norm / self.norms).clamp(max=1).tolist())
        return self.weighted_sum(lambda gradient: next(weights))

    def weighted_sum(self, weight: Callable[[Gradient], float]) -> Gradient:
        out = {name: torch.zeros_like(p) for name, p in self.problem.params.items()}
        for gradient in self.gradients(range(len(self.problem.x))):
            w = weight(gradient)
            for name, g in gradient.items():
                out[name].add_(g, alpha=w)
        return out


def norm(gradient: Gradient) -> Tensor:
    """In float64: over the 100 million elements of a large layer float32 loses a thousandth on a CPU."""
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradient.values()]).norm()


def check(work: str, answer: Any, loop: Loop, tolerance: float) -> float:
    """The relative error of `answer`; raises `WrongAnswer` where it exceeds `tolerance`."""
    error = {"rows": rows_error, "norms": norms_error, "clipped": clipped_error, "sum": sum_error}[work](
        answer, loop
    )
    if not error <= tolerance:
        raise WrongAnswer(f"wrong answer: relative error {error:.1e}")
    return error


def rows_error(rows: Mapping[str, Any], loop: Loop) -> float:
    """The worst over (at most 16, evenly spread) examples and over parameters."""
    batch = len(loop.problem.x)
    examples = torch.linspace(0, batch - 1, min(batch, CHECKED_ROWS)).long().tolist()
    gradients = loop.gradients(examples)
    return max(
        sum_error_of({n: rows[n][b] for n in rows}, g) for b, g in zip(examples, gradients, strict=True)
    )


def norms_error(norms: Any, loop: Loop) -> float:
    return ((tensor(norms, loop.norms) - loop.norms).abs() / loop.norms).max().item()


def clipped_error(grads: Mapping[str, Any], loop: Loop) -> float:
    return sum_error_of(grads, loop.clipped)


def sum_error(grads: Mapping[str, Any], loop: Loop) -> float:
    return sum_error_of(grads, loop.total)


def sum_error_of(grads: Mapping[str, Any], expected: Gradient) -> float:
    """The worst relative error over parameters, where one with next to no gradient counts by the whole's norm."""
    if missing := expected.keys() - grads.keys():
        raise WrongAnswer(f"wrong answer: no gradient for {', '.join(sorted(missing)[:3])}")
    floor = 1e-3 * norm(expected)
    errors = [(tensor(grads[n], e) - e).norm() / (e.norm() + floor) for n, e in expected.items()]
    return torch.stack(errors).max().item()


def tensor(value: Any, like: Tensor) -> Tensor:
    """A tensor of `value`, which may be another library's array."""
    if not isinstance(value, Tensor):
        import numpy

        value = torch.from_numpy(numpy.array(value))
    if value.shape != like.shape:
        raise WrongAnswer(f"wrong answer: shape {tuple(value.shape)} instead of {tuple(like.shape)}")
    return value.detach().to(like)
