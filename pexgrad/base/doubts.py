"""Doubts: tensors () that say whether a fast formula is too inaccurate for the numbers at hand, all of them read at once.

In an ordinary call the numbers are there, and `answers` looks at them. While a graph is recorded there are no numbers. Its
recorder may collect the doubts (`noting_doubts`): they become a result of the graph, and whoever runs it makes the ordinary
call instead where one of them is true. Where nobody collects them, `may_ask` is false, and the code has to take a way that
is always accurate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from .fakes import is_recorded

_noted: ContextVar[list[Tensor] | None] = ContextVar("noted", default=None)


@contextlib.contextmanager
def noting_doubts(noted: list[Tensor]) -> Iterator[None]:
    """Append the doubts of a recording to `noted`, for whoever runs the graph."""
    token = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(token)


def may_ask(t: Tensor) -> bool:
    """Whether doubts about such a tensor have an answer, now or when the recorded graph runs."""
    if is_recorded(t):
        return _noted.get() is not None
    return t.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def answers(doubts: Sequence[Tensor]) -> list[bool]:
    """What each doubt () says, with one synchronisation for all; False while they are collected."""
    if not doubts:
        return []
    if is_recorded(doubts[0]):
        noted = _noted.get()
        assert noted is not None
        noted += doubts
        return [False] * len(doubts)
    return torch.stack([d.to(doubts[0].device) for d in doubts]).tolist()
