"""The ordinary backward, and this library's strategies and convolution rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders.registry import CONTENDERS, Refused, contender
from benchmarks.problems import Problem

CONV_RULES = ("grouped", "unfold", "loop")


@contender("plain")
def plain(problem: Problem, work: str) -> Callable[[], Any]:
    """The sum of the gradients and nothing else: what ordinary training pays, whatever the work."""
    params = problem.params

    def gradient() -> dict[str, Tensor]:
        losses = problem.losses(problem.model(problem.x), problem.y)
        grads = torch.autograd.grad(losses.sum(), list(params.values()), materialize_grads=True)
        return dict(zip(params, grads, strict=True))

    return gradient


def prepare(problem: Problem, work: str, **options: Any) -> Callable[..., Any]:
    import pexgrad

    if work == "clipped":
        clipped = pexgrad.clipped_grad(problem.model, problem.losses, max_norm=problem.max_norm, **options)
        return lambda: clipped(problem.params, problem.x, problem.y).grads
    transform = {"rows": "per_example_grad", "norms": "per_example_grad_norm"}[work]
    answer = getattr(pexgrad, transform)(problem.model, problem.losses, **options)
    return lambda **buffers: answer(problem.params, problem.x, problem.y, **buffers)


CONTENDERS["naive"] = partial(prepare, strategy="naive")
CONTENDERS["multi"] = partial(prepare, strategy="multi")
CONTENDERS["crb"] = prepare


def with_rule(problem: Problem, work: str, conv_rule: str) -> Callable[[], Any]:
    if not any(p.dim() > 2 for p in problem.params.values()):
        raise Refused("no convolution here: the same as crb")
    return prepare(problem, work, conv_rule=conv_rule)


for rule in CONV_RULES:
    CONTENDERS[f"crb {rule}"] = partial(with_rule, conv_rule=rule)


class IntoBuffers:
    """Rows written into the last call's rows, which the contender therefore holds all the time."""

    def __init__(self, rows: Callable[..., Any]):
        self.rows = rows
        self.buffers = rows()
        self.held_bytes = sum(b.nbytes for b in self.buffers.values())

    def __call__(self) -> dict[str, Tensor]:
        self.buffers = self.rows(out=self.buffers)
        return self.buffers


@contender("crb out=")
def crb_out(problem: Problem, work: str) -> Callable[[], Any]:
    if work != "rows":
        raise Refused("out= is for rows")
    return IntoBuffers(prepare(problem, work))
