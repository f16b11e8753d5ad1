"""The errors of the library. Every one derives from `PexgradError` and says what to do."""

from __future__ import annotations


class PexgradError(Exception):
    """Base of every error that pexgrad raises on purpose."""


class InputError(PexgradError, ValueError):
    """An argument does not fit: a name, a shape, a dtype, a batch size, an option."""


class LossError(PexgradError, ValueError):
    """The loss gives no example its own number: it returns something else, compares examples, or reads what is not given."""


class TraceError(PexgradError, RuntimeError):
    """The model has no static graph, or a part of it that cannot be rewritten exactly."""


class OneExampleError(TraceError):
    """The model has graphs for larger batches, and none for a batch of one."""


class MixedExamplesError(PexgradError, RuntimeError):
    """The output of one example depends on another example, so rows are not defined."""


class VerificationError(PexgradError, RuntimeError):
    """The rows of a trace differ from the definition on a small batch, or a flat graph from the call that it is of."""


ANY_MODEL = 'use strategy="naive", which takes any model'


def first_line(e: BaseException) -> str:
    """What an error of another library says first."""
    return str(e).strip().partition("\n")[0]
