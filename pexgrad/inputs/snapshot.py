"""What one walk through a model has found (see `walk.py`), to be compared with what another finds."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor

from .contents import ATOMS
from .held import Held, Place, as_it_is, outline

# the mark behind what is in something
END = object()


class Snapshot(NamedTuple):
    """What a model holds at one moment, from one walk through it."""

    parameters: dict[str, Tensor]  # by the names of named_parameters(); a tied one once
    buffers: dict[str, Tensor]
    # a mark for everything that a trace depends on, behind its name: an object itself, or its type. They are compared by
    # identity, so whoever keeps a fingerprint keeps these too: an object that is alive shares its identity with no other.
    references: list[Any]
    loose: dict[Place, Tensor]  # tensors in attributes, containers, closures and globals

    def same(self, other: Snapshot | None) -> bool:
        """Whether another snapshot found the same objects, tensors included."""
        mine, theirs = self._objects(), [] if other is None else other._objects()
        return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))

    def same_but_for_floats(self, other: Snapshot) -> bool:
        """Whether another snapshot found the same but for tensors and floats: a coefficient that grows, say."""
        mine, theirs = ([r for r in s.references if not isinstance(r, float)] for s in (self, other))
        return len(mine) == len(theirs) and all(
            a is b or (type(a) is type(b) and type(a) in ATOMS and a == b)
            for a, b in zip(mine, theirs, strict=True)
        )

    def is_code(self) -> bool:
        """Whether nothing but functions was found: no number, container or object that may be another later."""
        held = self.parameters or self.buffers or self.loose
        # a name is a string; before one that is a value stands its type
        code = (FunctionType, CodeType, str)
        return not held and all(r is END or r is FunctionType or type(r) in code for r in self.references)

    def _objects(self) -> list[Any]:
        return [
            *self.references, *self.parameters.values(), *self.buffers.values(), *self.loose.values(),
        ]  # fmt: skip

    def fingerprint(self) -> tuple[int, ...]:
        """The identities of the references."""
        return tuple(map(id, self.references))

    def places(self, tensors: Iterable[Tensor]) -> dict[Place, Held]:
        """Those of the loose tensors that are among these."""
        wanted = set(map(id, tensors))
        return {place: Held(t, outline(t)) for place, t in self.loose.items() if id(t) in wanted}

    def contents(self) -> dict[Place, Held]:
        """All loose tensors, as they are now."""
        return {place: as_it_is(t) for place, t in self.loose.items()}

    def values(self) -> list[Held]:
        """All tensors that are no parameters, as they are now."""
        return [*map(as_it_is, (*self.loose.values(), *self.buffers.values()))]

    def holds(self, places: Mapping[Place, Held], *, numbers: bool = True) -> bool:
        """Whether each of the tensors is still in its place, and as it was, with or without its numbers."""
        return all(
            self.loose.get(place) is held.tensor and held.is_same(numbers) for place, held in places.items()
        )
