"""The traces of a model: made once for each kind of call, checked, kept and looked up again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..base.fakes import TRACING
from ..base.modes import uncompiled, unvalidated
from ..base.still import StandStill
from ..definition.remembered import refuse_remembered
from ..definition.verify import refuse_mixing, verify
from ..errors import (
    ANY_MODEL,
    LossError,
    MixedExamplesError,
    OneExampleError,
    PexgradError,
    TraceError,
    VerificationError,
)
from ..inputs.call import Call
from ..inputs.generators import States
from ..inputs.hooks import refuse_backward_hooks
from ..inputs.known import refuse_known
from ..inputs.preserved import preserved
from ..inputs.reached import forget_names
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction
from ..pipeline import Pipeline, build
from ..stages.few_examples import REPEATED, draw
from ..stages.layout import UntoldError
from .signature import identified, signature

_OF_A_KIND = 8  # traces for inputs of one kind that are worth a warning
_MOST = 64  # traces of one signature that are kept
_AGAIN = 16  # first calls that verify a trace again, where there is something left to tell


@dataclass
class Unverified:
    """The parameters of which a trace's verification has told nothing so far."""

    names: frozenset[str]
    calls: int = 0  # since that was made

    def is_due(self) -> bool:
        """Whether to look again at this call: at the first ones, then ever more rarely."""
        self.calls += 1
        return self.calls <= _AGAIN or self.calls.bit_count() == 1


class Traces:
    """The pipelines of a model and a loss, by the signature of the calls that they serve."""

    def __init__(self, model: Bound, loss: LossFunction, *, verified: bool, owner: str):
        self._model, self._loss, self._verified, self._owner = model, loss, verified, owner
        self._known: dict[Any, list[Pipeline]] = {}
        self._kept_alive: dict[Any, list[Any]] = {}  # what the keys of _known identify
        # likewise, of the signatures of single examples that have no trace
        self._untraced: dict[Any, list[Any]] = {}
        self._unverified: WeakKeyDictionary[Pipeline, Unverified] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[Pipeline]:
        return (pipeline for known in self._known.values() for pipeline in known)

    def of(self, call: Call) -> Pipeline:
        """The pipeline that serves a call, made now if none does."""
        key = signature(call)
        with TRACING:
            known = self._known.setdefault(key, [])
            for pipeline in [*known]:
                if pipeline.serves(call) and self._is_right_again(pipeline, call, known):
                    return pipeline
            refuse_backward_hooks(self._model.model)
            self._warn_of_changes(key)
            with self._checking():
                pipeline = self._made(call)
            known.insert(0, pipeline)  # it may take the place of one that no longer serves
            del known[_MOST:]  # of a model that reads another number at every step
            self._kept_alive.setdefault(key, identified(call))
            return pipeline

    def or_none(self, call: Call) -> Pipeline | None:
        """The same; None for a single example where only larger batches have a trace: the definition costs no more there."""
        if call.batch == 1 and self._untraced and signature(call) in self._untraced:
            return None
        try:
            return self.of(call)
        except OneExampleError:
            self._untraced[signature(call)] = identified(call)
            return None

    def anew(self, pipeline: Pipeline, call: Call) -> Pipeline:
        """Another one for a call that this one turned out not to serve."""
        with TRACING:
            known = self._known[signature(call)]
            if pipeline in known:
                known.remove(pipeline)
            return self.of(call)

    @contextlib.contextmanager
    def _checking(self) -> Iterator[None]:
        """What the model's own code runs in."""
        with uncompiled(), unvalidated(), preserved(self._loss.loss):
            yield

    def _is_right_again(self, pipeline: Pipeline, call: Call, known: list[Pipeline]) -> bool:
        """Whether a trace passes on this call too, where its verification so far has told nothing of some parameters.

        So a wrong trace does not pass for good by a first batch whose weights are zero, or at which every unit is off.
        """
        unverified = self._unverified.get(pipeline)
        if unverified is None or not call.batch or not unverified.is_due():
            return True
        few = draw(pipeline.trace.serves, call, REPEATED)
        try:
            with self._checking():
                unverified.names &= verify(pipeline, self._model, call, few)
        except PexgradError as e:
            known.remove(pipeline)
            if isinstance(e, UntoldError):  # a trace that is made with this call can tell
                return False
            raise
        except Exception:  # noqa: BLE001 - slightly different parameters may be outside the model's domain: nothing is told
            return True
        if not unverified.names:
            del self._unverified[pipeline]
        return True

    def _warn_of_changes(self, key: Any) -> None:
        """Warn where inputs of one kind have been traced again and again, because something else has changed."""
        others = [k for k, known in self._known.items() if known and k[1:] == key[1:]]
        if len(others) == _OF_A_KIND:
            warnings.warn(
                f"{self._owner} has been traced {len(others)} times for inputs of one kind, because something that the "
                "model holds or its code reads keeps changing (a counter, a setting). Each trace takes time and memory: pass "
                "what changes as an input, or keep it out of the model",
                stacklevel=2,
            )

    def _made(self, call: Call) -> Pipeline:
        forget_names()
        refuse_known(self._model.model)
        try:
            refuse_remembered(self._model, self._loss.loss, call)
            pipeline, few = build(self._model, self._loss, call)
            if self._verified:
                refuse_mixing(pipeline)
                if names := verify(pipeline, self._model, call, few):
                    self._unverified[pipeline] = Unverified(names)
        except (MixedExamplesError, LossError, VerificationError):
            raise
        except Exception as e:
            self._raise_own_error(call)
            if isinstance(e, PexgradError):
                raise
            raise TraceError(
                f"the model's graph cannot be evaluated: {type(e).__name__}: {e}; {ANY_MODEL}"
            ) from e
        return pipeline

    def _raise_own_error(self, call: Call) -> None:
        """Where the model or the loss itself fails on this batch, let its own error be the one that is seen."""
        params = {k: p.detach().clone().requires_grad_(k in call.trainable) for k, p in call.params.items()}
        # random numbers are neither drawn nor seeded, and the model may differentiate on its way
        drawn = States(call.module.references)
        with (
            torch.random.fork_rng(devices=()),
            drawn,
            StandStill(),
            torch.enable_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # the model's, which have been given before
            try:
                self._loss.loss(self._model.run(params, call.x), call.y)
            except Exception:
                # a loss of one number need not take a batch: what counts is what the definition does
                for b in range(call.batch):
                    one = call.examples(b, b + 1)
                    self._loss.loss(self._model.run(params, one.x), one.y)
                if not call.batch:
                    raise
