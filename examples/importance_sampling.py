"""Fewer examples for the same gradient: importance sampling by gradient norms on handwritten digits.

After some training most examples have gradients near zero. Drawing in proportion to the norms, and weighting by the
inverse of the probability, estimates the same mean gradient with less variance (Zhao and Zhang 2015, arXiv 1401.2753).
"""

from __future__ import annotations

import torch
from torch import Tensor
from training import Params, fit, model_and_params, train_and_test

import pexgrad


def flat(grads: Params) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([g.flatten() for g in grads.values()])


def main(draws: int = 100, k: int = 32) -> dict[float, float]:
    """Print the mean squared error of the gradient of k examples for each way to draw, and return it."""
    torch.set_num_threads(1)
    train, _ = train_and_test()
    model, params = model_and_params()
    params = fit(model, params, train.x, train.y, epochs=5)[-1]
    jacobian = pexgrad.per_example_jacobian(model)
    J = jacobian(params, train.x, train.y)
    norms, n = J.norms(), J.batch
    mean = flat(J.T @ torch.full((n,), 1 / n))
    top = norms.sort(descending=True).values
    print(
        f"the largest tenth of the gradients has {top[: n // 10].sum() / top.sum():.0%} of the sum of norms"
    )

    generator = torch.Generator().manual_seed(0)
    errors = {}
    for uniform in (1.0, 0.5, 0.1):
        total = 0.0
        for _ in range(draws):
            drawn = pexgrad.importance_sample(norms, k, uniform=uniform, generator=generator)
            estimate = jacobian(params, train.x[drawn.index], train.y[drawn.index]).T @ drawn.weights
            total += (flat(estimate) - mean).square().sum().item()
        errors[uniform] = total / draws / mean.square().sum().item()
        print(
            f"uniform part {uniform:.1f}: squared error of {k} examples {errors[uniform]:.2f} of the squared gradient"
        )
    return errors


if __name__ == "__main__":
    main()
