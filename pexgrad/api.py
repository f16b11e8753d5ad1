"""The public functions: each wraps a model once and returns a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.nn.functional as F

from .calls.clipped import ClippedGrad
from .calls.transform import Model
from .calls.transforms import (
    PerExampleGrad,
    PerExampleGradNorm,
    PerExampleJacobian,
    PerExampleValueAndGrad,
)
from .inputs.arguments import OptionArguments, Options
from .losses.torch_losses import Loss
from .operator.clipping import Clip, Clipping

if TYPE_CHECKING:
    from typing_extensions import Unpack


def per_example_grad(
    model: Model, loss: Loss = F.cross_entropy, **options: Unpack[OptionArguments]
) -> PerExampleGrad:
    """The gradient of every example's own loss, as a function of the parameters.

    >>> model = torch.nn.Linear(3, 2)
    >>> params, x, y = dict(model.named_parameters()), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> per_example_grad(model)(params, x, y)["weight"].shape
    torch.Size([5, 2, 3])

    Row b is the gradient of `loss(model(x_b), y_b).sum()`, where x_b, y_b are example b as a batch of one.

    Args:
        model: an `nn.Module`, or a function `f(params, *inputs) -> output`.
        loss: `loss(output, y)`, giving one number, or (B, ...) losses of each example.
        **options: `strategy`, `chunk_size`, `create_graph`, `verify`, `conv_rule`; see `pexgrad.Options`.

    Returns:
        A pure function `(params, x, y=None, *, out=None) -> {name: (B, *shape)}`. `x` is a tensor (`model(x)`), a tuple
        (`model(*x)`) or a dict (`model(**x)`) with the batch on dimension 0 of every tensor, `y` a tree of such tensors or
        None; `params` maps names to tensors, of which those with `requires_grad` in the model are differentiated (of a
        function's, all); names left out keep the model's own values. `out`, the rows of an earlier call with B examples or
        more, is written into instead of fresh memory. Results lie in memory of their own and may be changed in place.

    Raises:
        PexgradError: where the arguments do not fit, the examples mix, or the model cannot be traced.
    """
    return PerExampleGrad(model, loss, Options.of(options))


def per_example_value_and_grad(
    model: Model, loss: Loss = F.cross_entropy, **options: Unpack[OptionArguments]
) -> PerExampleValueAndGrad:
    """`per_example_grad` that also returns the losses: `(params, x, y) -> (losses (B,), {name: (B, *shape)})`.

    >>> losses, grads = per_example_value_and_grad(model)(params, x, y)
    >>> losses.shape
    torch.Size([5])

    Arguments, `out` and errors are those of `per_example_grad`.
    """
    return PerExampleValueAndGrad(model, loss, Options.of(options))


def per_example_grad_norm(
    model: Model, loss: Loss = F.cross_entropy, *, per_param: bool = False, **options: Unpack[OptionArguments]
) -> PerExampleGradNorm:
    """The norm of every example's gradient; rows are built only where nothing cheaper is exact, in bounded memory.

    >>> per_example_grad_norm(model)(params, x, y).shape
    torch.Size([5])

    Args:
        model: as for `per_example_grad`.
        loss: as for `per_example_grad`.
        per_param: give the norm for each parameter instead, `{name: (B,)}`.
        **options: as for `per_example_grad`.

    Returns:
        A pure function `(params, x, y=None) -> (B,)`, in the units of the gradient; half precision gives float32.

    Raises:
        PexgradError: as for `per_example_grad`.
    """
    return PerExampleGradNorm(model, loss, Options.of(options), per_param)


def per_example_jacobian(
    model: Model, loss: Loss = F.cross_entropy, **options: Unpack[OptionArguments]
) -> PerExampleJacobian:
    """The B x P Jacobian of the losses as an unevaluated linear operator.

    >>> J = per_example_jacobian(model)(params, x, y)
    >>> J.norms().shape, (J.T @ torch.ones(5))["weight"].shape, J.gram().shape
    (torch.Size([5]), torch.Size([2, 3]), torch.Size([5, 5]))

    Args:
        model: as for `per_example_grad`.
        loss: as for `per_example_grad`.
        **options: as for `per_example_grad`; `chunk_size` does not apply.

    Returns:
        A pure function `(params, x, y=None) -> Jacobian`, with `rows`, `norms`, `vjp`, `jvp`, `gram`, `moments`.

    Raises:
        PexgradError: as for `per_example_grad`.
    """
    return PerExampleJacobian(model, loss, Options.of(options))


def clipped_grad(
    model: Model,
    loss: Loss = F.cross_entropy,
    *,
    max_norm: float | Mapping[str, float] | None = None,
    clip: Clip = "flat",
    **options: Unpack[OptionArguments],
) -> ClippedGrad:
    """The sum over the batch of per-example gradients, each scaled down to a norm of at most `max_norm`.

    >>> out = clipped_grad(model, max_norm=1.0)(params, x, y)
    >>> out.grads["weight"].shape, out.norms.shape, out.losses.shape
    (torch.Size([2, 3]), torch.Size([5]), torch.Size([5]))

    sum_b g_b / max(1, |g_b| / C): Abadi et al. 2016 (arXiv 1607.00133), algorithm 1. It takes one forward and one
    backward; the weighted sum follows from the same cotangents as the norms.

    Args:
        model: as for `per_example_grad`.
        loss: as for `per_example_grad`.
        max_norm: the bound C, in the units of the gradient; or a dict from groups of parameters (a name, a module's path or
            a pattern such as `"*.bias"`) to a bound for each, of which it keeps a copy: each parameter that is differentiated
            belongs to one group, and `clip` is `"flat"`. Leave it out where `clip` is a function.
        clip: `"flat"` (one norm over all parameters), `"per_parameter"` (C / sqrt(n) for each of n), `"automatic"` (AUTO-S, Bu et
            al. 2022: normalise instead of clipping), or a function from norms (B,) to weights (B,).
        **options: as for `per_example_grad`.

    Returns:
        A pure function `(params, x, y=None, *, mask=None) -> Clipped` with `grads` (the sum, by name), `norms` (B,) before
        clipping, and `losses` (B,). `mask` (B,) of booleans says which examples count: the rest are padding and change nothing.
        The function's `sensitivity` is the largest norm that one example can add to the sum.

    Raises:
        PexgradError: as for `per_example_grad`, and where `max_norm` or `clip` does not fit.
    """
    return ClippedGrad(model, loss, Options.of(options), Clipping(max_norm, clip))
