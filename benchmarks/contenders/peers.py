"""Other libraries in PyTorch. Each gets the loss summed over the batch, and modules of its own to put hooks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.contenders.registry import Refused, contender, from_rows
from benchmarks.problems import Problem


@contender("vmap(grad)")
def vmap_grad(problem: Problem, work: str) -> Callable[[], Any]:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = torch.func.functional_call(problem.model, params, (x[None],))
        return problem.losses(output, y[None]).sum()

    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    params = {name: p.detach() for name, p in problem.params.items()}
    return from_rows(lambda: rows(params, problem.x, problem.y), work, problem.max_norm)


@contender("Opacus")
def opacus_hooks(problem: Problem, work: str) -> Callable[[], Any]:
    from opacus import GradSampleModule

    model = with_dp_lstm(hookable(problem))
    hooked = GradSampleModule(model, loss_reduction="sum")

    def rows() -> dict[str, Tensor]:
        losses_of(hooked, problem).sum().backward()
        return harvest(model, "grad_sample")

    return from_rows(rows, work, problem.max_norm)


@contender("Opacus ghost")
def opacus_ghost(problem: Problem, work: str) -> Callable[[], Any]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    if work == "rows":
        raise Refused("ghost clipping builds no rows")
    model = with_dp_lstm(hookable(problem))
    hooked = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=problem.max_norm, use_ghost_clipping=True
    )

    def norms() -> Tensor:
        losses_of(hooked, problem).sum().backward()
        forget_gradients(model)
        return hooked.get_norm_sample()

    def clipped() -> dict[str, Tensor]:
        """As Opacus' own `DPTensorFastGradientClipping.backward` does it: two backward passes."""
        losses = losses_of(hooked, problem)
        losses.sum().backward(retain_graph=True)
        forget_gradients(model)
        hooked.disable_hooks()
        (hooked.get_clipping_coef() * losses).sum().backward()
        hooked.enable_hooks()
        return harvest(model, "grad")

    return norms if work == "norms" else clipped


def with_dp_lstm(model: nn.Module) -> nn.Module:
    """Opacus has an LSTM of its own to be put in the place of PyTorch's, with the same parameter names."""
    from opacus.validators.lstm import fix

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LSTM):
                setattr(parent, name, fix(child))
    return model


@contender("BackPACK")
def backpack_batch_grad(problem: Problem, work: str) -> Callable[[], Any]:
    from backpack import backpack, extend, extensions

    model = extend(hookable(problem))

    def rows() -> dict[str, Tensor]:
        with backpack(extensions.BatchGrad()):
            losses_of(model, problem).sum().backward()
        return harvest(model, "grad_batch")

    return from_rows(rows, work, problem.max_norm)


@contender("ExpandedWeights")
def expanded_weights(problem: Problem, work: str) -> Callable[[], Any]:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    model = problem.private_copy()

    def rows() -> dict[str, Tensor]:
        forward = call_for_per_sample_grads(model, batch_size=len(problem.x), loss_reduction="sum")
        problem.losses(forward(problem.x), problem.y).sum().backward()
        return harvest(model, "grad_sample")

    return from_rows(rows, work, problem.max_norm)


def hookable(problem: Problem) -> nn.Module:
    """A private copy without in-place activations, which full backward hooks do not allow."""
    model = problem.private_copy()
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    return model


class OutOfPlaceAdditions(TorchFunctionMode):
    """`x += y` as `x = x + y`: the edit that a user of hooks is asked to make by hand."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.add if func is Tensor.add_ else func)(*args, **(kwargs or {}))


def losses_of(model: nn.Module, problem: Problem) -> Tensor:
    """(b,)"""
    with OutOfPlaceAdditions():
        return problem.losses(model(problem.x), problem.y)


def harvest(model: nn.Module, attribute: str) -> dict[str, Tensor]:
    """Take what backward left on the parameters, so that it lives as long as the answer does."""
    out = {name: getattr(p, attribute, None) for name, p in model.named_parameters()}
    forget_gradients(model)
    for p in model.parameters():
        setattr(p, attribute, None)
    if missing := [name for name, value in out.items() if value is None]:
        raise Refused(f"it leaves no gradient on {missing[0]} and {len(missing) - 1} other parameters")
    return out


def forget_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
