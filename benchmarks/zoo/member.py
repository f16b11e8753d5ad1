"""One model of the zoo with its inputs, and the loss that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Build = Callable[[], tuple[nn.Module, Any]]  # -> (model, x)


@dataclass(frozen=True)
class Member:
    """A model by name; `build` makes it with random weights and a batch of inputs."""

    source: str
    family: str
    name: str
    build: Build
    mixes: bool = False  # the model itself mixes the examples of a batch, so there are no rows to get


def batch_of(x: Any) -> int:
    return next(t for t in tree_leaves(x) if isinstance(t, Tensor)).shape[0]


def call(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def settle(model: nn.Module) -> nn.Module:
    """Evaluation mode, float64, and parameters away from the zeros and ones behind which mistakes hide."""
    model = model.eval().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.02)
    return model


def wave(output: Any, _: Any = None) -> Tensor:
    """(B,): no two elements of an example's main outputs enter alike, and large ones do not swamp the rest."""
    parts = []
    for t in main_outputs(output):
        flat = t.reshape(t.shape[0], -1)
        parts.append((flat.asinh() * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).mean(1))
    return torch.stack(parts).sum(0)


def main_outputs(output: Any) -> list[Tensor]:
    """The tensor, or the first one or two of an output object: logits, hidden states, poolings."""
    if isinstance(output, Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, dict) else list(output)
    found = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]
    return found[:2] or [t for v in values for t in tree_leaves(v) if isinstance(t, Tensor)][:2]
