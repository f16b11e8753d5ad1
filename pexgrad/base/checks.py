"""Checks of numbers and tensors that a user passes: one wording for each kind of mistake."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError


def one_of(value: Any, choices: Sequence[str], name: str) -> None:
    """Raise where `value` is none of the choices."""
    if value not in choices:
        raise InputError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def boolean(value: Any, name: str) -> None:
    """Raise where `value` is neither true nor false."""
    if not isinstance(value, bool):
        raise InputError(f"{name}={value!r} must be True or False")


def positive_int(value: Any, name: str) -> None:
    """Raise where `value` is not an integer above zero."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name}={value!r} must be a positive integer")


def positive(value: Any, name: str) -> float:
    """`value` as a float; raise where it is not a finite number above zero."""
    number = as_number(value)
    if number is None or not 0 < number < float("inf"):
        raise InputError(f"{name}={value!r} must be a positive, finite number")
    return number


def not_negative(value: Any, name: str) -> float:
    """`value` as a float; raise where it is not a finite number, at least zero."""
    number = as_number(value)
    if number is None or not 0 <= number < float("inf"):
        raise InputError(f"{name}={value!r} must be a finite number, at least 0")
    return number


def as_number(value: Any) -> float | None:
    """A number of Python's, of NumPy's, or in a tensor without dimensions; None for anything else."""
    if isinstance(value, Tensor) and not value.dim() and not value.is_complex() and value.dtype != torch.bool:
        return float(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def shaped(value: Any, shape: Sequence[Any], name: str, meaning: str = "") -> None:
    """Raise where `value` is not a tensor of this shape."""
    if not isinstance(value, Tensor) or value.shape != tuple(shape):
        raise InputError(f"{name} is {described(value)}; expected {tuple(shape)}{meaning and ', ' + meaning}")


def described(value: Any) -> str:
    """What a message says was found in place of a tensor: its shape, its type, or nothing."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    kind = type(value).__name__
    return "missing" if value is None else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
