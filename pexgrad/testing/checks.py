"""The library's answers for a model of one's own, compared with the definition."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from torch import nn

from ..api import per_example_jacobian, per_example_value_and_grad
from ..base import trees
from ..definition.agreement import doubled, refuse_difference
from ..errors import VerificationError
from ..losses.torch_losses import Loss
from .configs import LayerConfig, ModelConfig


def check_per_example_grad(
    model: nn.Module | ModelConfig | LayerConfig,
    x: Any,
    y: Any = None,
    loss: Loss = F.cross_entropy,
    *,
    tolerance: float = 1e-8,
) -> None:
    """Raise where the library's answers for a model are not those of the definition, a loop over batches of one.

    >>> check_per_example_grad(torch.nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))

    A copy of the model is converted to float64. Losses and rows are compared with the loop; norms, products, weighted
    and clipped sums with what those rows give. Put a model that draws random numbers in `.eval()`: the loop draws others.

    Args:
        model: a module, or one of `models()`, `conv_configs()`, `linear_configs()`.
        x: inputs with the batch on dimension 0.
        y: targets, likewise.
        loss: `loss(output, y)`, as for `per_example_grad`.
        tolerance: the largest relative error that passes.

    Raises:
        VerificationError: naming the parameter and the error, with the model as code and the inputs' shapes.
        PexgradError: where the library refuses the model.
    """
    module = copy.deepcopy(model) if isinstance(model, nn.Module) else model.module()
    module._apply(doubled)
    x, y = (trees.map_tensors(doubled, tree) for tree in (x, y))
    params = dict(module.named_parameters())
    losses, want = per_example_value_and_grad(module, loss, strategy="naive")(params, x, y)
    jacobian = per_example_jacobian(module, loss, verify=False)(params, x, y)
    try:
        refuse_difference(jacobian, losses, want, tolerance)
    except VerificationError as error:
        raise VerificationError(f"{error}\n\n{_as_code(model, x, y)}") from error


def _as_code(model: Any, x: Any, y: Any) -> str:
    lines = [f"model = {model!r}"]
    for name, tree in (("x", x), ("y", y)):
        for t in trees.tensors(tree):
            lines.append(f"# {name}: {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}")
    return "\n".join(lines)
