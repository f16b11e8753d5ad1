"""Hypothesis strategies: layers with every argument, small models, their batches and parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import PexgradError
from .configs import CLASSES, Layer, LayerConfig, ModelConfig, seeded

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


class _Strategies:
    """`hypothesis.strategies`, imported when it is first used, so that the checks work without it."""

    def __getattr__(self, name: str) -> Any:
        try:
            import hypothesis.strategies
        except ModuleNotFoundError as error:
            raise PexgradError(
                'the strategies of pexgrad.testing need hypothesis: pip install "pexgrad[test]"'
            ) from error
        return getattr(hypothesis.strategies, name)


st = _Strategies()


# --- layers ---------------------------------------------------------------------------------------


def conv_configs() -> SearchStrategy[LayerConfig]:
    """Convolutions with 1 to 3 spatial dimensions and every argument; the output is never empty.

    >>> @given(conv_configs())
    ... def test(config):
    ...     layer, x = config.build()
    ...     check_per_example_grad(config, x, loss=lambda output, _: output.square().flatten(1).sum(1))
    """
    return st.composite(_draw_conv)()


def _draw_conv(draw: DrawFn) -> LayerConfig:
    n = draw(st.sampled_from([1, 2, 3]))

    def each(elements: Any) -> tuple[int, ...]:
        return tuple(draw(elements) for _ in range(n))

    kernel, stride = each(_up_to((4, 3, 2)[n - 1])), each(_up_to(3))
    dilation = each(_up_to(3 if n < 3 else 2))
    padding: Any = draw(st.sampled_from(["valid", "same", "number"]))
    if padding == "same":
        stride = (1,) * n
    elif padding == "number":
        padding = each(st.integers(0, 2))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    span = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    # room for the kernel, and for the padding that wraps or mirrors; sizes mostly do not divide by the stride
    size = tuple(max(s + 1, 3 if mode != "zeros" else 1) + draw(st.integers(0, 4)) for s in span)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = groups * draw(_up_to(2)), groups * draw(_up_to(2))
    layer = Layer.of(
        f"Conv{n}d", *channels, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups,
        bias=draw(st.booleans()), padding_mode=mode,
    )  # fmt: skip
    return LayerConfig(layer, (draw(_up_to(4)), channels[0], *size))


def linear_configs() -> SearchStrategy[LayerConfig]:
    """Linear layers with up to three leading dimensions besides the batch, with and without a bias."""
    positions = st.lists(st.integers(1, 4), max_size=3)

    def config(batch: int, positions: list[int], i: int, o: int, bias: bool) -> LayerConfig:
        return LayerConfig(Layer.of("Linear", i, o, bias=bias), (batch, *positions, i))

    return st.builds(config, _up_to(5), positions, _up_to(5), _up_to(5), st.booleans())


def _up_to(largest: int) -> SearchStrategy[int]:
    return st.integers(1, largest)


# --- models ---------------------------------------------------------------------------------------


def models(
    kinds: tuple[str, ...] = ("vector", "image", "tokens"), max_layers: int = 4
) -> SearchStrategy[ModelConfig]:
    """Small classifiers: linear and convolutional layers, embeddings, norms, activations and pooling in any order.

    Args:
        kinds: of the examples: `"vector"` (I,), `"image"` (C, H, W), `"tokens"` (T,) of ids.
        max_layers: before the last linear layer.
    """
    return st.composite(_draw_model)(kinds, max_layers)


def _draw_model(draw: DrawFn, kinds: tuple[str, ...], max_layers: int) -> ModelConfig:
    kind = draw(st.sampled_from(kinds))
    layers: list[Layer] = []
    vocabulary = None
    if kind == "tokens":
        vocabulary, width = draw(_up_to(5)), draw(_up_to(4))
        shape: tuple[int, ...] = (draw(_up_to(4)),)
        layers.append(Layer("Embedding", (vocabulary, width)))
        inner = (*shape, width)
    elif kind == "vector":
        shape = inner = (draw(_up_to(5)),)
    else:
        shape = inner = (draw(_up_to(2)), *(draw(st.integers(2, 5)) for _ in "hw"))
    for _ in range(draw(st.integers(0, max_layers))):
        layer = draw(st.sampled_from(_CHOICES[kind]))(draw, inner)
        layers.append(layer)
        inner = _after(layer, inner)
    if len(inner) > 1:
        layers.append(Layer("Flatten"))
    layers.append(Layer("Linear", (torch.Size(inner).numel(), CLASSES)))
    return ModelConfig(tuple(layers), shape, vocabulary)


def _after(layer: Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    with torch.device("meta"):
        return tuple(layer.module()(torch.empty(1, *shape)).shape[1:])


def _activation(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    return Layer(draw(st.sampled_from(["Tanh", "Softplus", "GELU"])))


def _linear(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    return Layer.of("Linear", shape[-1], draw(_up_to(4)), bias=draw(st.booleans()))


def _layer_norm(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    return Layer("LayerNorm", (shape[-1],))


def _conv(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    kernel, stride, padding = draw(_up_to(min(shape[1:]))), draw(_up_to(2)), draw(st.integers(0, 1))
    groups = draw(st.sampled_from(sorted({1, shape[0]})))
    channels = shape[0], groups * draw(_up_to(2))
    return Layer.of("Conv2d", *channels, kernel, stride=stride, padding=padding, groups=groups)


def _group_norm(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    # torch refuses to normalise a single number
    groups = [g for g in sorted({1, shape[0]}) if torch.Size(shape).numel() > g]
    if not groups:
        return _activation(draw, shape)
    return Layer("GroupNorm", (draw(st.sampled_from(groups)), shape[0]))


def _pool(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    return Layer("AvgPool2d", (min(2, *shape[1:]),))


_CHOICES = {
    "vector": (_linear, _activation, _layer_norm),
    "tokens": (_linear, _activation, _layer_norm),
    "image": (_conv, _activation, _group_norm, _pool),
}


def batches(model: ModelConfig, max_size: int = 4) -> SearchStrategy[tuple[Tensor, Tensor]]:
    """Batches (x, y) for one of `models()`: x (B, *shape) in float64 or token ids, y (B,) labels.

    >>> @given(models(), st.data())
    ... def test(model, data):
    ...     x, y = data.draw(batches(model))
    """
    return st.builds(model.batch, _up_to(max_size), st.integers(0, 99))


def parameters(model: nn.Module | ModelConfig, max_scale: float = 2.0) -> SearchStrategy[dict[str, Tensor]]:
    """Values for a model's parameters, by name: normal numbers of a drawn scale, in the parameters' own dtypes.

    >>> @given(parameters(torch.nn.Linear(3, 2)))
    ... def test(params):
    ...     assert params["weight"].shape == (2, 3)
    """
    module = model.module().double() if isinstance(model, ModelConfig) else model
    shapes = {k: p.detach() for k, p in module.named_parameters()}

    def draw(seed: int, scale: float) -> dict[str, Tensor]:
        return seeded(lambda: {k: torch.randn_like(p) * scale for k, p in shapes.items()}, seed)

    return st.builds(draw, st.integers(0, 99), st.sampled_from([max_scale / 2, max_scale / 20, max_scale]))
