"""Where in the user's code something happens."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig

import einops
import sympy
import torch

from .. import errors

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(f)) + os.sep
    for f in (torch.__file__, sympy.__file__, einops.__file__, errors.__file__, contextlib.__file__)
)


_INSTALLED = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to us, and not to the user's program."""
    return filename.startswith((*_LIBRARIES, *_INSTALLED, "<built-in>", "<frozen"))


def is_library(filename: str) -> bool:
    """Whether code of this file is torch's or ours, and not the user's."""
    return filename.startswith((*_LIBRARIES, "<"))


def calling_line() -> str:
    """The innermost line of code that is neither torch's nor ours: `file.py:12`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
