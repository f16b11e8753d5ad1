"""What per-example gradients are for beside privacy: short measures, each with the source of its formula.

`batches` is any iterable of pairs (x, y), such as a `DataLoader`. It is gone through once and a batch is forgotten
when the next one comes, so memory does not grow with the data set beyond the numbers returned; `tqdm(loader)` shows
progress. Batches are moved to the parameters' device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import nested
from .base.checks import as_number, described, positive_int
from .base.numerics import accumulable, square
from .calls.loaders import pairs
from .errors import InputError
from .inputs.arguments import Params
from .operator.jacobian import Jacobian, Moments

Batches = Iterable[Any]  # of pairs (x, y), or (x,), or x alone
JacobianOf = Callable[[Params, Any, Any], Jacobian]


def grand_scores(
    norm: Callable[[Params, Any, Any], Any], seeds: Iterable[Params], batches: Batches
) -> Tensor:
    """The GraNd score of every example: the norm of its gradient, averaged over several initialisations.

    >>> norm = per_example_grad_norm(model)
    >>> grand_scores(norm, [params, params], [(x[:3], y[:3]), (x[3:], y[3:])]).shape
    torch.Size([5])

    E_w |dL(w, x, y)/dw|: Paul, Ganguli and Dziugaite 2021 (arXiv 2107.07075), definition 2.1. They keep the examples
    with the largest scores, after a few epochs of training in each of ten runs.

    Args:
        norm: what `per_example_grad_norm` returns.
        seeds: the parameters of each run, name -> tensor.
        batches: pairs (x, y); gone through once.

    Returns:
        (N,), in the order in which the batches come, so leave the loader's `shuffle` off.

    Raises:
        InputError: where there is no seed or no batch, or `norm` does not give (B,).
    """
    runs = _some(seeds, "seeds")
    scores = []
    for x, y in pairs(batches, runs[0]):
        norms = [norm(params, x, y) for params in runs]
        if not all(isinstance(n, Tensor) and n.dim() == 1 for n in norms):
            raise InputError("norm must give (B,), as per_example_grad_norm(model) does without per_param")
        scores.append(torch.stack(norms).mean(0))
    return torch.cat(_some(scores, "batches"))


def tracin(
    jacobian: JacobianOf, checkpoints: Iterable[Params], batches: Batches, test: tuple[Any, Any],
    rates: float | Sequence[float] | Tensor = 1.0,
) -> Tensor:  # fmt: skip
    """The influence of every training example on every test example: inner products of gradients along training.

    >>> jacobian = per_example_jacobian(model)
    >>> tracin(jacobian, [params], [(x[:3], y[:3]), (x[3:], y[3:])], (x[:2], y[:2]), rates=0.1).shape
    torch.Size([5, 2])

    sum_i rate_i <dL(w_i, z)/dw, dL(w_i, z')/dw>: TracInCP of Pruthi, Liu, Kale and Sundararajan 2020 (arXiv
    2002.08484). Positive: a step on the training example lowers the test example's loss. No row is built where the
    inner products have a cheaper form.

    Args:
        jacobian: what `per_example_jacobian` returns.
        checkpoints: parameters saved during training, name -> tensor.
        batches: pairs (x, y) of training examples; gone through once.
        test: one pair (x, y) of M test examples, held for every checkpoint together.
        rates: the learning rate at each checkpoint, or one for all.

    Returns:
        (N, M), training examples in the order in which the batches come.

    Raises:
        InputError: where there is no checkpoint or no batch, or not one rate for each checkpoint.
    """
    saved = _some(checkpoints, "checkpoints")
    one = as_number(rates)
    steps = [*rates] if one is None else [one] * len(saved)  # pyright: ignore[reportGeneralTypeIssues]
    if len(steps) != len(saved):
        raise InputError(
            f"{len(steps)} rates for {len(saved)} checkpoints; give one for each, or one for all"
        )
    ((x_test, y_test),) = pairs([test], saved[0])
    tests = [_of(jacobian, params, x_test, y_test) for params in saved]
    lines = []
    for x, y in pairs(batches, saved[0]):
        grams = [
            rate * _of(jacobian, p, x, y).gram(t) for rate, p, t in zip(steps, saved, tests, strict=True)
        ]
        lines.append(torch.stack(grams).sum(0))
    return torch.cat(_some(lines, "batches"))


def dataset_moments(jacobian: JacobianOf, params: Params, batches: Batches) -> tuple[Moments, int]:
    """The mean and the second moment of the rows over a whole data set, and how many examples it has.

    >>> moments, examples = dataset_moments(per_example_jacobian(model), params, [(x[:3], y[:3]), (x[3:], y[3:])])
    >>> moments.second["weight"].shape, examples
    (torch.Size([2, 3]), 5)

    Args:
        jacobian: what `per_example_jacobian` returns.
        params: name -> tensor.
        batches: pairs (x, y), of any sizes; gone through once.

    Returns:
        `Moments` with `mean` and `second` (name -> (*shape)), and the number of examples N. Half precision gives
        float32.

    Raises:
        InputError: where there is no batch, or no example in them.
    """
    mean: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    seen, paths = 0, None
    for x, y in pairs(batches, params):
        J = _of(jacobian, params, x, y)
        if not J.batch:
            continue
        seen, paths = seen + J.batch, J.paths
        part = J.moments()
        for total, new in ((mean, part.mean), (second, part.second)):
            for k, value in nested.flatten(new).items():
                value = accumulable(value)
                # a running mean: no sum grows with the data set
                total[k] = value if k not in total else total[k] + (value - total[k]) * (J.batch / seen)
    if not seen:
        raise InputError("batches holds no example")
    parts = (mean, second) if paths is None else (nested.nest(part, paths) for part in (mean, second))
    return Moments(*parts), seen


@dataclass(frozen=True)
class NoiseScale:
    """The simple gradient noise scale and the two estimates that it is the ratio of, in squared units of the gradient.

    Attributes:
        noise: tr(S), for the covariance S of the rows.
        signal: |G|^2, for the gradient G of the expected loss; an estimate from little data can be negative.
    """

    noise: float
    signal: float

    @property
    def scale(self) -> float:
        """tr(S) / |G|^2, in examples; infinite where the signal cannot be told from zero."""
        return self.noise / self.signal if self.signal > 0 else float("inf")


def noise_scale(moments: Moments, examples: int) -> NoiseScale:
    """The simple noise scale: about how many examples a batch needs for the gradient to outweigh its noise.

    >>> J = per_example_jacobian(model)(params, x, y)
    >>> noise_scale(J.moments(), J.batch).scale > 0
    True

    B_simple = tr(S) / |G|^2: McCandlish, Kaplan, Amodei et al. 2018 (arXiv 1812.06162), equation 2.9. Both parts are
    estimated without bias as in their appendix A.1, with batches of 1 and of N examples:

        |G|^2 = (N |m|^2 - s) / (N - 1),    tr(S) = (s - |m|^2) / (1 - 1/N)

    for the mean m of the rows and the mean s of their squared norms. The ratio is not unbiased: average `noise` and
    `signal` over steps and divide once.

    Args:
        moments: of N rows, from `J.moments()` or `dataset_moments`.
        examples: N, at least 2.

    Returns:
        `NoiseScale` with `noise`, `signal` (both in squared units of the gradient) and `scale`, a number of examples.

    Raises:
        InputError: where `examples` is below 2.
    """
    if not isinstance(moments, Moments):
        raise InputError(
            f"moments is {described(moments)}; expected J.moments() or the first of dataset_moments"
        )
    positive_int(examples, "examples")
    if examples < 2:
        raise InputError(f"examples={examples}: the spread of gradients takes at least 2 of them")
    n = examples
    mean_sq = sum(float(square(m).sum(dtype=torch.float64)) for m in nested.flatten(moments.mean).values())
    sq = sum(float(s.sum(dtype=torch.float64)) for s in nested.flatten(moments.second).values())
    return NoiseScale(noise=(sq - mean_sq) / (1 - 1 / n), signal=(n * mean_sq - sq) / (n - 1))


def fisher_diagonal(jacobian: JacobianOf, params: Params, batches: Batches) -> dict[str, Tensor]:
    """The diagonal of the empirical Fisher matrix: the mean of the squared rows, elementwise.

    >>> fisher_diagonal(per_example_jacobian(model), params, [(x, y)])["weight"].shape
    torch.Size([2, 3])

    (1/N) sum_n (dL_n/dw)^2 for a loss that is a negative log-likelihood, at the labels of the data. The Fisher matrix
    proper takes the expectation over labels drawn from the model; for that, draw y from the model's output. What the
    difference means: Kunstner, Balles and Hennig 2019 (arXiv 1905.12558).

    Args:
        jacobian: what `per_example_jacobian` returns.
        params: name -> tensor.
        batches: pairs (x, y); gone through once.

    Returns:
        name -> (*shape), at least 0. Half precision gives float32.

    Raises:
        InputError: where there is no example.
    """
    return dataset_moments(jacobian, params, batches)[0].second


def _of(jacobian: JacobianOf, params: Params, x: Any, y: Any) -> Jacobian:
    found = jacobian(params, x, y)
    if not isinstance(found, Jacobian):
        raise InputError(f"jacobian gives {described(found)}; pass what per_example_jacobian(model) returns")
    return found


def _some(items: Iterable[Any], name: str) -> list[Any]:
    found = list(items)
    if not found:
        raise InputError(f"{name} is empty")
    return found
