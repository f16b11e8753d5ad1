"""Whether the model and the loss of a transform can be pickled, found out without writing their tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor

from ..errors import PexgradError


class _WithoutTensors(pickle.Pickler):
    """Goes through what pickle would, but does not write the numbers."""

    def persistent_id(self, obj: Any) -> str | None:
        return "tensor" if isinstance(obj, Tensor) else None


def check_pickles(name: str, part: Any) -> None:
    """Raise where the model or the loss of a transform cannot be pickled."""
    try:
        _WithoutTensors(io.BytesIO()).dump(part)
    except Exception as e:
        raise PexgradError(
            f"the function cannot be pickled because its {name} cannot: {e}; use functions and classes that are defined "
            "at the top level of a module, or make the function again where it is needed"
        ) from e
