"""Which training examples made the model say that? TracIn on handwritten digits, some of which are mislabelled.

The influence of a training example on a test example is the inner product of their gradients, summed over
checkpoints (Pruthi et al. 2020, arXiv 2002.08484). Mislabelled training examples lower few test losses and raise
many, so the sum of their influence on the test examples is low.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from training import fit, model_and_params, train_and_test

import pexgrad


def main(mislabelled: int = 100) -> float:
    """Print influential examples and how many wrong labels are among the least helpful; return that part."""
    torch.set_num_threads(1)
    train, test = train_and_test()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(train.y), generator=generator)[:mislabelled]
    labels = train.y.clone()
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (mislabelled,), generator=generator)) % 10

    model, params = model_and_params()
    lr = 0.1
    checkpoints = fit(model, params, train.x, labels, epochs=6, lr=lr)[1::2]
    loader = DataLoader(
        TensorDataset(train.x, labels), batch_size=256
    )  # not shuffled: scores come in its order
    influence = pexgrad.tracin(
        pexgrad.per_example_jacobian(model),
        checkpoints,
        tqdm(loader, "influence", leave=False),
        (test.x, test.y),
        lr,
    )  # (training examples, test examples)

    for j in range(3):
        helpful, harmful = influence[:, j].topk(5), (-influence[:, j]).topk(5)
        print(f"test digit {test.y[j]}: most helpful {labels[helpful.indices].tolist()}, ", end="")
        print(f"most harmful {labels[harmful.indices].tolist()} (labels)")
    least = influence.sum(1).argsort()[:mislabelled]
    found = len(set(least.tolist()) & set(wrong.tolist())) / mislabelled
    print(f"of the {mislabelled} least helpful training examples, {found:.0%} are mislabelled", end="")
    print(f" ({mislabelled / len(labels):.0%} of all are)")
    return found


if __name__ == "__main__":
    main()
