"""The table of contenders, and what one that builds rows does to get norms and clipped sums out of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import Problem

Rows = dict[str, Tensor]
Contender = Callable[[Problem, str], Callable[[], Any]]

CONTENDERS: dict[str, Contender] = {}


class Refused(Exception):
    """A contender does not do this work, or not on this model; the message says why."""


def contender(name: str) -> Callable[[Contender], Contender]:
    def register(prepare: Contender) -> Contender:
        CONTENDERS[name] = prepare
        return prepare

    return register


def from_rows(rows: Callable[[], Rows], work: str, max_norm: float) -> Callable[[], Any]:
    """The call that does `work`, given the call that builds the rows."""
    return {
        "rows": rows,
        "norms": lambda: norms(rows()),
        "clipped": lambda: clipped_sum(rows(), max_norm),
    }[work]


def norms(rows: Rows) -> Tensor:
    """(b,)"""
    return torch.stack([torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in rows.values()]).norm(
        dim=0
    )


def clipped_sum(rows: Rows, max_norm: float) -> dict[str, Tensor]:
    weights = (max_norm / norms(rows)).clamp(max=1)
    return {name: (weights @ g.reshape(len(g), -1)).view(g.shape[1:]) for name, g in rows.items()}


def reason(failure: Exception) -> str:
    """One line for the table, without paths."""
    if isinstance(failure, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(failure):
        return "out of memory"
    if isinstance(failure, ModuleNotFoundError):
        return f"{failure.name} is not installed"
    text = re.sub(r"\s*(?:[A-Za-z]:)?(?:/[\w.+-]+){2,}/?", " ", str(failure))
    line = " ".join(text.split())
    prefix = "" if type(failure).__name__ in ("Refused", "WrongAnswer") else f"{type(failure).__name__}: "
    return prefix + (line if len(line) <= 160 else line[:157] + "...")
