"""Calls of the library on a case, made once and shared by the tests of a process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from cases.case import TABLE
from oracle import copied, rows_of
from purity import snapshot

import pexgrad


@dataclass
class Answer:
    """One case with the function that pexgrad makes of it, and what its first call gave."""

    model: Any
    x: Any
    y: Any
    loss: Any
    fn: Any
    losses: Any
    rows: Any
    want: Any
    before: dict
    after: dict

    @property
    def params(self):
        return dict(self.model.named_parameters())


@functools.cache
def _answer(name):
    case = TABLE[name]
    model, x, y, loss = case.build()
    want = rows_of(model, loss, x, y)
    given = copied(x), copied(y)
    before = snapshot(model, *given)
    fn = pexgrad.per_example_value_and_grad(model, loss)
    try:
        losses, rows = fn(dict(model.named_parameters()), *given)
    except pexgrad.PexgradError as error:
        losses, rows = None, error
    return Answer(model, x, y, loss, fn, losses, rows, want, before, snapshot(model, *given))


def answer(case):
    """The shared answer to a case; skips where the library refuses a case that it may refuse."""
    found = _answer(case.name)
    if isinstance(found.rows, pexgrad.PexgradError):
        if "may_refuse" not in case.tags:
            raise found.rows
        pytest.skip(f"refused: {str(found.rows).splitlines()[0]}")
    return found


def or_refused(case, call, tag="may_refuse"):
    """What `call()` gives; skips where it is refused and the case may be."""
    try:
        return call()
    except pexgrad.PexgradError as error:
        if tag not in case.tags:
            raise
        pytest.skip(f"refused: {str(error).splitlines()[0]}")
