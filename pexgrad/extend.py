"""The whole extension surface: register a rule for an operation, and check it.

A rule gives the per-example gradient of one operand of one ATen operation as a *factor*, from the cotangent of the
operation's output and the forward values that it names:

>>> @register_rule(torch.ops.aten.linear.default, "bias")
... def linear_bias(g, *, shape, dtype):  # g (b, t, *rest)
...     return Broadcast(g.flatten(1, -2), None, shape, dtype)

Positional parameters after the first are the operation's arguments whose values the rule needs, by their name in the
schema; keyword-only ones are its settings, plus `shape` and `dtype` of the operand, `batch_dim` of the output, and
`conv_rule`. Batched tensors arrive as (b, t, *rest): `rest` is the shape without the batch dimension, and t counts the
positions of that dimension that belong to one example (1, unless the batch was folded with another axis).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .api import per_example_jacobian, per_example_value_and_grad
from .base.numerics import flat as flattened
from .definition.agreement import doubled, refuse_difference
from .factors import Broadcast as Broadcast
from .factors import Conv as Conv
from .factors import Factor as Factor
from .factors import Geometry as Geometry
from .factors import Outer as Outer
from .factors import Rows as Rows
from .factors import Scatter as Scatter
from .rules.registry import register_rule as register_rule
from .rules.registry import registered as registered
from .rules.registry import replaced


def check_rule(
    function: Callable[..., Any], params: dict[str, Tensor], *inputs: Tensor, tolerance: float = 1e-8
) -> None:
    """Raise where the rules that `function(params, *inputs)` runs through are wrong.

    >>> check_rule(lambda p, x: torch.nn.functional.linear(x, p["w"]), {"w": torch.randn(4, 3)}, torch.randn(5, 2, 3))

    Everything is converted to float64. Losses and rows are compared with the definition, a loop over batches of one; norms,
    products, weighted and clipped sums with what those rows give.

    Args:
        function: uses the operation under test; its output has the batch on dimension 0.
        params: name -> tensor.
        *inputs: input tensors with the batch on dimension 0, of at least two examples.
        tolerance: the largest relative error that passes.

    Raises:
        VerificationError: naming the parameter, what is wrong, and by how much.
    """
    params = {k: doubled(p) for k, p in params.items()}
    x = tuple(doubled(t) for t in inputs)
    losses, want = per_example_value_and_grad(function, _probe_loss, strategy="naive")(params, x)
    jacobian = per_example_jacobian(function, _probe_loss, verify=False)(params, x)
    refuse_difference(jacobian, losses, want, tolerance)


def _probe_loss(output: Tensor, _: None) -> Tensor:
    """A fixed non-linear function of every element of the output, for each example."""
    flat = flattened(torch.view_as_real(output) if output.is_complex() else output)
    return (flat * torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype, device=flat.device)).sin().sum(1)


__all__ = [
    "Broadcast", "Conv", "Factor", "Geometry", "Outer", "Rows", "Scatter",
    "check_rule", "register_rule", "registered", "replaced",
]  # fmt: skip
