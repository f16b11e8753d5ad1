"""JAX's vmap(grad) under jit, on the models that translate layer by layer: stacks of convolutions and linear layers.

A translated module is a function of (params, x), where params are named as in PyTorch and x is one example.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import reduce, singledispatch
from typing import Any

import torch
from torch import nn

from benchmarks.contenders.registry import Refused, contender
from benchmarks.models import image_losses
from benchmarks.problems import Problem

Translated = Callable[[dict[str, Any], Any], Any]


@contender("JAX vmap(grad)+jit")
def jax_vmap_grad(problem: Problem, work: str) -> Callable[[], Any]:
    os.environ.setdefault("NPROC", str(torch.get_num_threads()))  # the size of XLA's thread pool on a CPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # most of the GPU's memory, otherwise
    import jax
    import jax.numpy as jnp

    if problem.losses is not image_losses:
        raise Refused("not written in JAX here: this loss")
    forward = translate(problem.model, "")
    device = jax_device(problem.x.device.type)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if tf32 else "float32")

    def loss(params: dict[str, Any], x: Any, y: Any) -> Any:
        return -jax.nn.log_softmax(forward(params, x))[y]

    def rows(params: dict[str, Any], x: Any, y: Any) -> dict[str, Any]:
        return jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x, y)

    def norms(grads: dict[str, Any]) -> Any:
        return jnp.sqrt(sum(jnp.sum(g.reshape(len(g), -1) ** 2, axis=1) for g in grads.values()))

    def clipped(grads: dict[str, Any]) -> dict[str, Any]:
        weights = jnp.minimum(1, problem.max_norm / norms(grads))
        return {name: jnp.tensordot(weights, g, axes=1) for name, g in grads.items()}

    finish = {"rows": lambda grads: grads, "norms": norms, "clipped": clipped}[work]
    compiled = jax.jit(lambda *data: finish(rows(*data)))
    params, batch = Converted(device), Converted(device)
    return lambda: jax.block_until_ready(
        compiled(params.of(problem.params), *batch.of((problem.x, problem.y)))
    )


def jax_device(kind: str) -> Any:
    import jax

    try:
        return jax.devices("gpu" if kind == "cuda" else kind)[0]
    except RuntimeError as failure:
        raise Refused("this JAX has no GPU backend") from failure


class Converted:
    """Tensors as JAX arrays, kept until other tensors are given."""

    def __init__(self, device: Any):
        self.device, self.source, self.arrays = device, None, None

    def of(self, tensors: Any) -> Any:
        import jax

        leaves = list(map(id, jax.tree.leaves(tensors)))
        if leaves != self.source:
            arrays = jax.tree.map(lambda t: t.detach().cpu().numpy(), tensors)
            self.source, self.arrays = leaves, jax.device_put(arrays, self.device)
        return self.arrays


@singledispatch
def translate(module: nn.Module, name: str) -> Translated:
    raise Refused(f"not written in JAX here: {type(module).__name__}")


@translate.register
def _(module: nn.Sequential, name: str) -> Translated:
    return in_turn([translate(child, f"{name}{key}.") for key, child in module.named_children()])


def in_turn(steps: list[Translated]) -> Translated:
    return lambda params, x: reduce(lambda value, step: step(params, value), steps, x)


@translate.register
def _(module: nn.Linear, name: str) -> Translated:
    return lambda params, x: params[f"{name}weight"] @ x + params[f"{name}bias"]


@translate.register
def _(module: nn.Conv2d, name: str) -> Translated:
    from jax.lax import conv_general_dilated

    padding = [(p, p) for p in module.padding]

    def conv(params: dict[str, Any], x: Any) -> Any:
        y = conv_general_dilated(x[None], params[f"{name}weight"], module.stride, padding)[0]
        return y + params[f"{name}bias"][:, None, None]

    return conv


@translate.register
def _(module: nn.MaxPool2d, name: str) -> Translated:
    import jax.numpy as jnp
    from jax.lax import max, reduce_window

    window, stride = ((1, n, n) for n in (module.kernel_size, module.stride))
    return lambda params, x: reduce_window(x, -jnp.inf, max, window, stride, "VALID")


@translate.register
def _(module: nn.ReLU, name: str) -> Translated:
    import jax

    return lambda params, x: jax.nn.relu(x)


@translate.register
def _(module: nn.Flatten, name: str) -> Translated:
    return lambda params, x: x.reshape(-1)


@translate.register
def _(module: nn.Dropout, name: str) -> Translated:
    return lambda params, x: x


@translate.register
def _(module: nn.AdaptiveAvgPool2d, name: str) -> Translated:
    import jax.numpy as jnp

    def pool(params: dict[str, Any], x: Any) -> Any:
        down, across = (averages(*sizes) for sizes in zip(module.output_size, x.shape[1:], strict=True))
        return jnp.einsum("oh,chw,pw->cop", down, x, across)

    return pool


def averages(o: int, h: int) -> Any:
    """(o, h): row i takes the mean over PyTorch's i-th window of h values."""
    windows = [range(i * h // o, -(-(i + 1) * h // o)) for i in range(o)]
    return torch.tensor([[(j in w) / len(w) for j in range(h)] for w in windows]).numpy()


def features_then_classifier(module: Any, name: str) -> Translated:
    """AlexNet and VGG."""
    parts = {
        "features": module.features,
        "avgpool": module.avgpool,
        "": nn.Flatten(),
        "classifier": module.classifier,
    }
    return in_turn([translate(part, f"{name}{key}.") for key, part in parts.items()])


try:
    from torchvision.models import VGG, AlexNet

    translate.register(AlexNet, features_then_classifier)
    translate.register(VGG, features_then_classifier)
except ImportError:
    pass
