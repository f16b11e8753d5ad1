"""Two runs from the same start over the same batches, one private and one not, and a table of both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

from pexgrad.demo import dpsgd
from pexgrad.demo.digits import Digits, small_cnn, train_and_test
from pexgrad.demo.dpsgd import Gradient, Params
from pexgrad.demo.options import Options
from pexgrad.noise import fresh_generator


@dataclass(frozen=True)
class Run:
    """What one run came to."""

    accuracy: float
    epsilon: float
    steps: int
    seconds: float


def main(options: Options) -> tuple[Run, Run]:
    """Train privately and not, print the table, and return (private, not private)."""
    torch.set_num_threads(1)  # the model is too small to gain from more
    train, test = train_and_test()
    rate = sampling_rate(options.batch_size, len(train.y))
    steps = max(1, round(options.epochs / rate))
    model = initial_model(options.seed)
    generator = seeded(options.seed)
    batches = list(dpsgd.poisson_batches(len(train.y), rate, steps, generator))

    def spent(steps: int) -> float:
        return dpsgd.epsilon(rate, options.noise_multiplier, steps, options.delta)

    def run(gradient: Gradient, batches: Iterable[Tensor], epsilon: float) -> Run:
        start = time.perf_counter()
        params = descend(model, gradient, train, batches, options)
        return Run(accuracy(model, params, test), epsilon, steps, time.perf_counter() - start)

    print(
        f"{len(train.y)} training examples, {len(test.y)} test examples, batches of about {options.batch_size}"
    )
    private_gradient = dpsgd.private_gradient(
        model, options.max_norm, options.noise_multiplier, options.batch_size, generator
    )
    private = run(private_gradient, private_bar(batches, spent), spent(steps))
    plain_gradient = dpsgd.plain_gradient(model, options.batch_size)
    plain = run(plain_gradient, tqdm(batches, "not private"), math.inf)
    print(table(private, plain, options))
    return private, plain


def descend(
    model: nn.Module, gradient: Gradient, train: Digits, batches: Iterable[Tensor], options: Options
) -> Params:
    """Follow `gradient` from the model's own parameters, one step a batch; the model stays as it is."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    for batch in batches:
        grads = gradient(params, train.x[batch], train.y[batch])
        params, velocity = dpsgd.sgd(params, velocity, grads, options.learning_rate, options.momentum)
    return params


def accuracy(model: nn.Module, params: Params, test: Digits) -> float:
    """The part of the test examples that the model gets right."""
    return (functional_call(model, params, (test.x,)).argmax(1) == test.y).float().mean().item()


def sampling_rate(batch_size: int, examples: int) -> float:
    """The probability with which a batch takes in an example."""
    if batch_size > examples:
        raise SystemExit(f"--batch-size is {batch_size}, but there are only {examples} training examples")
    return batch_size / examples


def initial_model(seed: int | None) -> nn.Module:
    """The start of both runs: anybody may know it, so it must not come from the seed of the noise."""
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed + 1)
    return small_cnn()


def seeded(seed: int | None) -> torch.Generator:
    """The source of batches and noise.

    A seed serves to repeat a demonstration, and whoever knows it can subtract the noise. Without one the state
    comes from the system's entropy. A real release also wants a cryptographically secure generator, and a Gaussian
    sampler that is safe against what the low bits of floating-point numbers tell (Mironov 2012).
    """
    if seed is None:
        return fresh_generator(torch.device("cpu"))
    return torch.Generator().manual_seed(seed)


def private_bar(batches: Sequence[Tensor], spent: Callable[[int], float]) -> Iterator[Tensor]:
    """A progress bar that shows epsilon so far, and neither loss nor batch size: those are not noisy."""
    steps = len(batches)
    every = -(-steps // 10)  # the accountant takes longer than a step
    bar = tqdm(batches, "private")
    for step, batch in enumerate(bar, 1):
        yield batch
        if step % every == 0 or step == steps:
            bar.set_postfix_str(f"epsilon {spent(step):.3g}")


def table(private: Run, plain: Run, options: Options) -> str:
    """Both runs, side by side."""
    rows = [
        ("", "private", "not private"),
        ("test accuracy", f"{private.accuracy:.1%}", f"{plain.accuracy:.1%}"),
        ("epsilon", f"{private.epsilon:.3g}", f"{plain.epsilon:.3g}"),
        ("delta", f"{options.delta:g}", "-"),
        ("noise multiplier", f"{options.noise_multiplier:g}", "-"),
        ("max norm", f"{options.max_norm:g}", "-"),
        ("steps", f"{private.steps}", f"{plain.steps}"),
        ("seconds", f"{private.seconds:.1f}", f"{plain.seconds:.1f}"),
    ]
    return "\n".join(f"{name:<18}{left:>10}{right:>14}" for name, left, right in rows)
