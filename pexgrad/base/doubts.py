"""Whether numbers are such that a quick way to a result is not to be trusted, asked once for all of a call.

Where numbers are there, they are looked at. A graph has none while it is recorded: its recorder may note what is to be asked, and
whoever runs the graph calls the code itself where the answer is yes. Where nobody asks, there has to be another way.
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
    """What is asked while a graph is recorded is appended to `noted`, for whoever runs it."""
    token = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(token)


def may_ask(t: Tensor) -> bool:
    """Whether questions about numbers like these have an answer, now or when a graph is run."""
    if is_recorded(t):
        return _noted.get() is not None
    return t.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def answers(doubts: Sequence[Tensor]) -> list[bool]:
    """What each of these, (), says, with one synchronisation for all; no, while they are noted."""
    if not doubts:
        return []
    if is_recorded(doubts[0]):
        noted = _noted.get()
        assert noted is not None
        noted += doubts
        return [False] * len(doubts)
    return torch.stack([d.to(doubts[0].device) for d in doubts]).tolist()
