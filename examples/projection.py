"""Gradients of a whole data set in little memory: random projections and TRAK scores on handwritten digits.

Each row, of P = 3,818 numbers here, is projected to k numbers by a random matrix that is never stored. Inner products
survive; with them TRAK (Park et al. 2023, arXiv 2303.14186) estimates how the output on a test example depends on each
training example: phi(z)^T (Phi^T Phi)^-1 phi(z'), for the gradients phi of the correct class's log odds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from training import fit, model_and_params, train_and_test

import pexgrad


def log_odds(logits: Tensor, y: Tensor) -> Tensor:
    """(B,): log p / (1 - p) for the probability p of the right class."""
    right = logits.gather(1, y[:, None])[:, 0]
    others = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return right - others


def main(k: int = 512) -> tuple[float, float]:
    """Print how well inner products are kept and what the scores find; return the error and the agreement."""
    torch.set_num_threads(1)
    train, test = train_and_test()
    model, params = model_and_params()
    params = fit(model, params, train.x, train.y, epochs=5)[-1]
    jacobian = pexgrad.per_example_jacobian(model, log_odds)

    def projected(x: Tensor, y: Tensor) -> Tensor:
        return pexgrad.project(jacobian(params, x, y), k)

    loader = DataLoader(TensorDataset(train.x, train.y), batch_size=256)
    phi = torch.cat([projected(x, y) for x, y in tqdm(loader, "projection", leave=False)])  # (N, k)
    phi_test = projected(test.x, test.y)

    exact = jacobian(params, train.x[:200], train.y[:200])
    norms = exact.norms()
    error = ((phi[:200] @ phi[:200].T - exact.gram()) / norms[:, None] / norms).square().mean().sqrt().item()
    print(
        f"{phi.shape[0]} gradients in {k} numbers each; error of their cosines {error:.3f}, 1/sqrt(k) is {k**-0.5:.3f}"
    )

    kernel = phi.T @ phi
    ridge = 1e-3 * kernel.trace() / k * torch.eye(k)
    scores = phi @ torch.linalg.solve(kernel + ridge, phi_test.T)  # (N, M)
    same = train.y[scores.topk(5, dim=0).indices] == test.y
    agreement = same.float().mean().item()
    print(
        f"of the five training digits with the largest TRAK score, {agreement:.0%} are of the test digit's class"
    )
    return error, agreement


if __name__ == "__main__":
    main()
