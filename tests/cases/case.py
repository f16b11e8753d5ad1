"""What one entry of the table of models is, and the small parts its entries are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

TABLE: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A model with its inputs and loss, and what is special about it."""

    name: str
    make: Callable  # batch size -> (model, x, y, loss)
    tags: frozenset
    batch: int = 3
    tol: float = 1e-9
    match: str | None = None  # what the message of a refusal must speak of
    warns: tuple[str, ...] = ()  # warnings that torch gives for such a model

    def build(self, batch=None):
        """(model, x, y, loss), with the same model at every batch size."""
        torch.manual_seed(0)
        model, x, y, loss = self.make(self.batch)
        if batch is not None:
            _, x, y, loss = self.make(batch)
        torch.manual_seed(1)
        with torch.no_grad():  # away from the ones and zeros of fresh norms, where mistakes hide
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        return model, x, y, loss


def case(*tags, **options):
    """Add the decorated builder to the table under its own name."""

    def add(make):
        assert make.__name__ not in TABLE, make.__name__
        TABLE[make.__name__] = Case(make.__name__, make, frozenset(tags), **options)
        return make

    return add


class Net(nn.Module):
    """A module whose forward is `forward(self, *inputs)`, with the keyword arguments as its members."""

    def __init__(self, forward, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def param(*shape):
    return nn.Parameter(torch.randn(*shape))


def labels(b, classes=5):
    return torch.arange(b) % classes


def ids(b, length, vocabulary):
    """Token ids (B, length) with repeats inside an example and between examples."""
    return (torch.arange(b)[:, None] * 3 + torch.arange(length)[None] ** 2) % vocabulary


def wave(out, y=None):
    """A loss (B,) that no two elements of an example's output enter alike."""
    flat = out.unsqueeze(-1).flatten(1)
    return (flat * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)).sin().sum(1)


def sliced_ce(out, y):
    """A scalar loss of the user's own: it is evaluated on each example's slice."""
    return F.cross_entropy(out, y)
