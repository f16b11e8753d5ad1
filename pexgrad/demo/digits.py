"""The data and the model: 8 x 8 images of handwritten digits, and a CNN small enough for two cores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TEST_EXAMPLES = 360  # of 1,797


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) in [0, 1] and their labels (n,)."""

    x: Tensor
    y: Tensor


def train_and_test() -> tuple[Digits, Digits]:
    """The same split in every run, whatever its seed, so that runs can be compared."""
    pixels, labels = load_digits(return_X_y=True)
    # 16 is the largest value a pixel can have, so nothing here is estimated from private data
    x = torch.tensor(pixels, dtype=torch.float32).div(16).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_EXAMPLES], order[TEST_EXAMPLES:]
    return Digits(x[train], y[train]), Digits(x[test], y[test])


def small_cnn() -> nn.Module:
    """3,818 parameters; bounded activations keep gradients short, so clipping distorts them less."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),  # (b, 8, 4, 4)
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),  # (b, 256)
        nn.Linear(256, 10),
    )
