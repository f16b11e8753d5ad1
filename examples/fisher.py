"""How precisely must each layer be stored? The Fisher diagonal of a CNN for handwritten digits.

Noise of standard deviation s on the weights of a layer, as from rounding them, raises the loss by about s^2 / 2 times
the sum of the layer's Fisher diagonal. The Fisher matrix proper takes labels drawn from the model's own output; the
empirical one takes the data's, and grows small as the training data are fitted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from training import fit, model_and_params, train_and_test

import pexgrad


def main(noise: float = 0.1, draws: int = 50) -> dict[str, tuple[float, float, float]]:
    """Print the predicted and the measured rise of the loss for each layer, and return them."""
    torch.set_num_threads(1)
    train, _ = train_and_test()
    model, params = model_and_params()
    params = fit(model, params, train.x, train.y, epochs=8)[-1]
    logits = functional_call(model, params, (train.x,))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]

    jacobian = pexgrad.per_example_jacobian(model)

    def diagonal(y: Tensor, name: str) -> dict[str, Tensor]:
        loader = DataLoader(TensorDataset(train.x, y), batch_size=128)
        return pexgrad.fisher_diagonal(jacobian, params, tqdm(loader, name, leave=False))

    proper, empirical = diagonal(drawn, "labels of the model"), diagonal(train.y, "labels of the data")
    base = F.cross_entropy(logits, train.y)
    print(f"{'weights':<10}{'number':>8}{'Fisher':>10}{'empirical':>11}{'measured':>10}   rise of the loss")
    result = {}
    for name in (n for n in params if n.endswith("weight")):
        rises = []
        for _ in range(draws):
            step = noise * torch.randn(params[name].shape, generator=generator)
            moved = functional_call(model, params | {name: params[name] + step}, (train.x,))
            rises.append(F.cross_entropy(moved, train.y) - base)
        measured = torch.stack(rises).mean().item()
        predicted, by_data = (noise**2 / 2 * f[name].sum().item() for f in (proper, empirical))
        print(f"{name:<10}{params[name].numel():>8}{predicted:>10.4f}{by_data:>11.4f}{measured:>10.4f}")
        result[name] = predicted, by_data, measured
    return result


if __name__ == "__main__":
    main()
