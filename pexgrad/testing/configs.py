"""Layers and models of torch.nn as values that print as the code that makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 3  # of the models' outputs


class _Code:
    """What hypothesis prints as code that makes it, and not by its fields."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Layer(_Code):
    """A layer of torch.nn as code."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, *args: Any, **given: Any) -> Layer:
        """With those of the keyword arguments that are not the layer's own defaults."""
        usual = inspect.signature(getattr(nn, name)).parameters
        given = {k: _short(v) for k, v in given.items()}
        return cls(name, args, tuple((k, v) for k, v in given.items() if v != usual[k].default))

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)]
        return f"nn.{self.name}({', '.join(arguments)})"

    def module(self) -> nn.Module:
        """The layer itself."""
        return getattr(nn, self.name)(*self.args, **dict(self.kwargs))


def _short(value: Any) -> Any:
    """(2, 2) as 2: the same for each dimension."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


@dataclass(frozen=True, repr=False)
class LayerConfig(_Code):
    """A layer and the shape of its input (B, ...); its `repr` is code that makes the layer."""

    layer: Layer
    shape: tuple[int, ...]

    def __repr__(self) -> str:
        return repr(self.layer)

    def module(self) -> nn.Module:
        """The layer, always with the same weights."""
        return seeded(self.layer.module)

    def build(self) -> tuple[nn.Module, Tensor]:
        """The layer and an input, always the same."""
        return self.module(), seeded(lambda: torch.randn(self.shape))


@dataclass(frozen=True, repr=False)
class ModelConfig(_Code):
    """A small classifier of examples of one shape; its `repr` is code that makes it."""

    layers: tuple[Layer, ...]
    shape: tuple[int, ...]  # of one example
    vocabulary: int | None = None  # examples are token ids below it, and not numbers

    def __repr__(self) -> str:
        return f"nn.Sequential({', '.join(map(repr, self.layers))})"

    def module(self) -> nn.Module:
        """The model, always with the same weights."""
        return seeded(lambda: nn.Sequential(*(layer.module() for layer in self.layers)))

    def batch(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x (size, *shape) and labels (size,)."""

        def draw() -> tuple[Tensor, Tensor]:
            if self.vocabulary is None:
                x = torch.randn(size, *self.shape, dtype=torch.float64)
            else:
                x = torch.randint(self.vocabulary, (size, *self.shape))
            return x, torch.randint(CLASSES, (size,))

        return seeded(draw, seed)


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """What `make` gives from this seed, with the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
