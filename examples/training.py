"""What the examples share: the handwritten digits, a small CNN, and a plain training loop that saves checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pexgrad.demo.digits import small_cnn, train_and_test

Params = dict[str, Tensor]
__all__ = ["Params", "accuracy", "fit", "model_and_params", "small_cnn", "train_and_test"]


def model_and_params(seed: int = 0) -> tuple[nn.Module, Params]:
    """The model and its initial parameters; the same for the same seed."""
    torch.manual_seed(seed)
    model = small_cnn()
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}


def fit(
    model: nn.Module,
    params: Params,
    x: Tensor,
    y: Tensor,
    epochs: int,
    lr: float = 0.3,
    batch_size: int = 64,
    seed: int = 0,
) -> list[Params]:
    """Parameters before training and after each epoch of plain SGD, shuffled by the seed."""
    order, saved = torch.Generator().manual_seed(seed), [params]
    for _ in range(epochs):
        for index in torch.randperm(len(y), generator=order).split(batch_size):
            params = {name: p.detach().requires_grad_() for name, p in params.items()}
            loss = F.cross_entropy(functional_call(model, params, (x[index],)), y[index])
            grads = torch.autograd.grad(loss, list(params.values()))
            params = {name: p.detach() - lr * g for (name, p), g in zip(params.items(), grads, strict=True)}
        saved.append(params)
    return saved


def accuracy(model: nn.Module, params: Params, x: Tensor, y: Tensor) -> float:
    """The part of the examples that the model gets right."""
    return (functional_call(model, params, (x,)).argmax(1) == y).float().mean().item()
