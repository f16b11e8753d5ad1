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

from .nodes import draws

Still = Callable[..., Any]

# where an operation that is told no device makes its values: `torch.set_default_device` tells them before they get here
CPU = torch.device("cpu")

# what a tensor is filled with, from the distribution's settings; `exponential_(x)`, in place, and `exponential(x)` alike
_LEVELS: dict[str, Callable[..., float]] = {
    "bernoulli": lambda *_: 1.0,
    "uniform": lambda low=0.0, high=1.0: (low + high) / 2,
    "normal": lambda mean=0.0, std=1.0: mean + 0.5 * std,
    "exponential": lambda *_: 1.0,
    "log_normal": lambda *_: 1.0,
    "cauchy": lambda *_: 0.5,
    "geometric": lambda *_: 1.0,
    "random": lambda *_: 0.0,
    "rand_like": lambda: 0.5,
    "randn_like": lambda: 0.5,
    "randint_like": lambda *_: 0.0,
}


def _halves(size: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    return torch.full(size, 0.5, dtype=dtype, device=device or CPU)


def _randperm(n: int, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Not the identity, which would hide mixing."""
    return torch.arange(n - 1, -1, -1, dtype=dtype or torch.long, device=device or CPU)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _multinomial(p: Tensor, n: int, *args: Any, **kwargs: Any) -> Tensor:
    return p.topk(n, -1).indices


def _slopes(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3) -> Tensor:
    return torch.where(x > 0, 1, (lower + upper) / 2).to(x.dtype)


def _rrelu(x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x * noise.copy_(_slopes(x, *args[:2]))  # read again by the backward


def _rrelu_functional(x: Tensor, noise: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    slopes = _slopes(x, *args[:2])
    return x * slopes, slopes


def _randint(
    low: int, high: int, size: Any, *, dtype: Any = torch.long, device: Any = None, **kwargs: Any
) -> Tensor:
    return torch.full(size, low, dtype=dtype or torch.long, device=device or CPU)


def _normal(
    mean: Any = 0.0, std: Any = 1.0, size: Any = None, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> Tensor:
    level = mean + 0.5 * std
    return level if isinstance(level, Tensor) else torch.full(size, level, dtype=dtype, device=device or CPU)


_STILL: dict[str, Still] = {
    "poisson": lambda x: x.round(),
    "_standard_gamma": lambda x: x.clone(),
    "rand": _halves,
    "randn": _halves,
    "randperm": _randperm,
    "randint": _randint,
    "normal": _normal,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": lambda x, *args, **kwargs: x.copy_(_rrelu(x, *args)),
    "rrelu_with_noise_functional": _rrelu_functional,
}


class StandStill(TorchDispatchMode):
    """A dispatch mode in which random operations return constants."""

    supports_higher_order_operators = True  # `torch.cond` and its like

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func):
            return func(*args, **kwargs)
        space, name = func._schema.name.split("::")
        if space != "aten":
            return func(*args, **kwargs)
        if name == "randint" and func._overloadname != "low":
            args = (0, *args)
        if name in _STILL:
            return _STILL[name](
                *_without_generators(args), **{k: v for k, v in kwargs.items() if k != "generator"}
            )
        distribution = name.removesuffix("_").removesuffix("_functional")
        if distribution not in _LEVELS:
            return func(*_without_chance(func, args), **kwargs)
        x, *settings = _without_generators(args)
        # after those given by position
        settings += [kwargs[k] for k in ("from", "to", "mean", "std") if k in kwargs]
        level = _LEVELS[distribution](*settings)
        if name.endswith("_"):
            return x.fill_(level)
        return torch.full_like(x, level, **{k: v for k, v in kwargs.items() if k in ("dtype", "device")})


def _without_generators(args: tuple[Any, ...]) -> list[Any]:
    return [a for a in args if a is not None and not isinstance(a, torch.Generator)]


def _without_chance(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` with the probability of a fused dropout, or its training flag, switched off."""
    # not `train` of a recurrent layer, without which cuDNN has no backward
    off = {"dropout_p": 0.0, "dropout": 0.0, "p": 0.0, "training": False}
    names = [a.name for a in func._schema.arguments]
    return tuple(
        off.get(name, a) if not isinstance(a, Tensor) else a for name, a in zip(names, args, strict=False)
    )
