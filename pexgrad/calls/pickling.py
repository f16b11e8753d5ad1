"""How a transform is pickled and copied: without what it has traced, which the copy traces again."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import PexgradError
from ..inputs.rebind import Bound
from ..losses.loss import LossFunction

if TYPE_CHECKING:
    from typing_extensions import Self


class Pickled:
    """The part of a transform that is about copies of it."""

    _model: Bound
    _loss: LossFunction
    _traced = ("_traces", "_graphs", "_by_structure", "_handle")  # attributes that a copy makes anew

    def _reset(self) -> None:
        """Begin without anything that was traced: sets those attributes."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        for name, part in (("model", self._model.model), ("loss", self._loss.loss)):
            _check_pickles(name, part)
        return self._state()

    def _state(self) -> dict[str, Any]:
        """What the transform is made of, without what it has traced."""
        return {k: v for k, v in vars(self).items() if k not in self._traced}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__setstate__(self._state())
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = object.__new__(type(self))
        other.__setstate__(copy.deepcopy(self._state(), memo))
        return other


class _WithoutTensors(pickle.Pickler):
    """Goes through what pickle would, but does not write the numbers."""

    def persistent_id(self, obj: Any) -> str | None:
        return "tensor" if isinstance(obj, Tensor) else None


def _check_pickles(name: str, part: Any) -> None:
    try:
        _WithoutTensors(io.BytesIO()).dump(part)
    except Exception as e:
        raise PexgradError(
            f"the function cannot be pickled because its {name} cannot: {e}; use functions and classes that are defined "
            "at the top level of a module, or make the function again where it is needed"
        ) from e
