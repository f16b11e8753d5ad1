"""For models whose code asks whether it is being traced, by `isinstance(x, FakeTensor)`, and then computes something else.

The first trace answers truthfully, for the code may then avoid what has no graph. Where that trace fails, another one is made
in which the answer is no.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..base.source import is_library


@contextlib.contextmanager
def disguised(hidden: bool) -> Iterator[list[str]]:
    """Gives the files of code outside the libraries that has asked; with `hidden`, that code is told no."""
    asked: list[str] = []

    class Asking(type(FakeTensor)):
        def __instancecheck__(cls, instance: Any) -> bool:
            filename = sys._getframe(1).f_code.co_filename
            if is_library(filename):
                return isinstance(instance, FakeTensor)
            asked.append(filename)
            return isinstance(instance, FakeTensor) and not hidden

    class Stand(FakeTensor, metaclass=Asking):
        pass

    with mock.patch.object(torch._subclasses, "FakeTensor", Stand):
        yield asked
