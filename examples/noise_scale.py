"""How large should a batch be? The gradient noise scale on handwritten digits, as training goes on.

A batch much smaller than the noise scale gives a gradient that is mostly noise; one much larger hardly improves
on it (McCandlish et al. 2018, arXiv 1812.06162). The scale grows as the loss falls.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from training import accuracy, fit, model_and_params, train_and_test

import pexgrad


def main() -> list[float]:
    """Print the noise scale after 0, 1, ... epochs, and return it."""
    torch.set_num_threads(1)
    train, test = train_and_test()
    model, params = model_and_params()
    loader = DataLoader(TensorDataset(train.x, train.y), batch_size=128)
    jacobian = pexgrad.per_example_jacobian(model)
    scales = []
    print(f"{'epoch':>6}{'test accuracy':>15}{'tr(S)':>10}{'|G|^2':>10}{'noise scale':>13}")
    for epoch, saved in enumerate(fit(model, params, train.x, train.y, epochs=6)):
        # one pass over the data, one batch in memory at a time
        moments, examples = pexgrad.dataset_moments(
            jacobian, saved, tqdm(loader, f"epoch {epoch}", leave=False)
        )
        noise = pexgrad.noise_scale(moments, examples)
        right = accuracy(model, saved, test.x, test.y)
        print(f"{epoch:>6}{right:>15.1%}{noise.noise:>10.3f}{noise.signal:>10.4f}{noise.scale:>13.1f}")
        scales.append(noise.scale)
    return scales


if __name__ == "__main__":
    main()
