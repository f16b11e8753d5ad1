"""Differentially private SGD (Abadi et al. 2016, arXiv 1607.00133, algorithm 1), as functions of the parameters.

A batch takes in every example with probability q, independently. Each per-example gradient g_b is clipped to
g_b / max(1, |g_b| / C), so that one example more or less changes their sum by at most C. Gaussian noise of
standard deviation sigma C hides that change, and the accountant adds up what all the steps together give away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dp_accounting
import torch
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from torch import Tensor, nn
from torch.func import functional_call

import pexgrad

Params = dict[str, Tensor]
Gradient = Callable[[Params, Tensor, Tensor], Params]


def poisson_batches(examples: int, rate: float, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of `steps` batches; their sizes vary, and may be 0: the accountant counts on exactly this."""
    for _ in range(steps):
        yield (torch.rand(examples, generator=generator, device=generator.device) < rate).nonzero().flatten()


def private_gradient(
    model: nn.Module, max_norm: float, noise_multiplier: float, batch_size: int, generator: torch.Generator
) -> Gradient:
    """The noisy mean of clipped per-example gradients: all that training gets to see of the data.

    The mean is over the *expected* batch size. The size of the batch at hand depends on who is in it, so dividing
    by that would not be covered by epsilon. An empty batch is a step of noise alone; leaving it out would tell that
    nobody was in it.
    """
    clipped_grad = pexgrad.clipped_grad(model, max_norm=max_norm)

    def gradient(params: Params, x: Tensor, y: Tensor) -> Params:
        sums = clipped_grad(params, x, y).grads
        noisy = pexgrad.add_noise(sums, noise_multiplier, max_norm, generator)
        return {name: total / batch_size for name, total in noisy.items()}

    return gradient


def plain_gradient(model: nn.Module, batch_size: int) -> Gradient:
    """The same mean by ordinary autograd, without clipping and noise."""

    def gradient(params: Params, x: Tensor, y: Tensor) -> Params:
        params = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = F.cross_entropy(functional_call(model, params, (x,)), y, reduction="sum")
        grads = torch.autograd.grad(loss / batch_size, list(params.values()))
        return dict(zip(params, grads, strict=True))

    return gradient


def sgd(params: Params, velocity: Params, grads: Params, lr: float, momentum: float) -> tuple[Params, Params]:
    """One step of SGD with momentum; what happens to a noisy gradient costs no further privacy."""
    velocity = {name: momentum * velocity[name] + grad for name, grad in grads.items()}
    return {name: value - lr * velocity[name] for name, value in params.items()}, velocity


def epsilon(rate: float, noise_multiplier: float, steps: int, delta: float) -> float:
    """The epsilon that goes with `delta` after `steps` steps, for adding or removing one example."""
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))
