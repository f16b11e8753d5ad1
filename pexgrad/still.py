"""Randomness stood still: every random operation gives a constant that does not depend on the batch.

Used where two runs of one model are compared (the probe and the verification), so that dropout and the like
are the same function on both sides. The generators are neither read nor advanced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Still = Callable[..., Any]


def _filled(level: float) -> Still:
    return lambda x, *args, **kwargs: x.fill_(level)


def _like(level: float) -> Still:
    return lambda x, *args, **kwargs: torch.full_like(x, level)


def _sized(level: float) -> Still:
    def make(size: Any, *args: Any, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.full(size, level, dtype=dtype, device=device)

    return make


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _multinomial(p: Tensor, n: int, *args: Any, **kwargs: Any) -> Tensor:
    return p.topk(n, -1).indices


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *args: Any, **kwargs: Any
) -> Tensor:
    noise.copy_(torch.where(x > 0, 1, (lower + upper) / 2))  # read again by the backward
    return x * noise


def _randint(
    low: int, high: int, size: Any, *, dtype: Any = torch.long, device: Any = None, **kwargs: Any
) -> Tensor:
    return torch.full(size, low, dtype=dtype or torch.long, device=device)


def _normal(mean: Any, std: Any, *args: Any, **kwargs: Any) -> Tensor:
    return torch.as_tensor(mean + 0.5 * std)


_STILL: dict[str, Still] = {
    "bernoulli_": _filled(1.0),
    "uniform_": lambda x, low=0.0, high=1.0, **kwargs: x.fill_((low + high) / 2),
    "normal_": lambda x, mean=0.0, std=1.0, **kwargs: x.fill_(mean + 0.5 * std),
    "exponential_": _filled(1.0),
    "log_normal_": _filled(1.0),
    "cauchy_": _filled(0.5),
    "geometric_": _filled(1.0),
    "random_": _filled(0.0),
    "bernoulli": _like(1.0),
    "rand_like": _like(0.5),
    "randn_like": _like(0.5),
    "randint_like": _like(0.0),
    "poisson": lambda x, *args, **kwargs: x.round(),
    "rand": _sized(0.5),
    "randn": _sized(0.5),
    "randperm": lambda n, *args, **kwargs: torch.arange(
        n - 1, -1, -1
    ),  # not the identity, which would hide mixing
    "randint": _randint,
    "normal": _normal,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu,
}


class StandStill(TorchDispatchMode):
    """A dispatch mode in which random operations return constants."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[-1]
        if name == "randint" and func._overloadname != "low":
            args = (0, *args)
        if name in _STILL:
            return _STILL[name](*args, **{k: v for k, v in kwargs.items() if k != "generator"})
        return func(*_without_chance(func, args), **kwargs)


def _without_chance(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` with the probability of a fused dropout, or its training flag, switched off."""
    off = {"dropout_p": 0.0, "dropout": 0.0, "p": 0.0, "training": False}
    names = [a.name for a in func._schema.arguments]
    return tuple(
        off.get(name, a) if not isinstance(a, Tensor) else a for name, a in zip(names, args, strict=False)
    )
