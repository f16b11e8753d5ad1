"""Training on half of the data: GraNd scores of handwritten digits.

The score of an example is the norm of its gradient early in training, averaged over runs from different
initialisations (Paul et al. 2021, arXiv 2107.07075). The half with the largest scores is kept, and compared with the
half with the smallest and with a random half.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from training import accuracy, fit, model_and_params, train_and_test

import pexgrad


def main(seeds: int = 4, epochs: int = 6) -> dict[str, float]:
    """Print the test accuracy for each way to choose the half, averaged over runs, and return it."""
    torch.set_num_threads(1)
    train, test = train_and_test()
    model, _ = model_and_params()
    early = [fit(model, model_and_params(s)[1], train.x, train.y, epochs=1, seed=s)[-1] for s in range(seeds)]
    loader = DataLoader(TensorDataset(train.x, train.y), batch_size=128)
    scores = pexgrad.grand_scores(
        pexgrad.per_example_grad_norm(model), early, tqdm(loader, "scores", leave=False)
    )

    order, half = scores.argsort(descending=True), len(scores) // 2
    random = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    chosen = {"largest scores": order[:half], "random": random[:half], "smallest scores": order[half:]}
    result = {}
    for name, index in chosen.items():
        runs = []
        for seed in range(seeds, seeds + 3):  # not the runs that the scores come from
            params = fit(model, model_and_params(seed)[1], train.x[index], train.y[index], epochs, seed=seed)[
                -1
            ]
            runs.append(accuracy(model, params, test.x, test.y))
        result[name] = sum(runs) / len(runs)
        print(f"half with {name:<16} test accuracy {result[name]:.1%}")
    return result


if __name__ == "__main__":
    main()
