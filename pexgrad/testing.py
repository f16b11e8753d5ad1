"""Property tests for models and rules: strategies that draw them, and checks that compare them with the definition.

>>> @given(models(), st.data())
... def test_any_model(model, data):
...     x, y = data.draw(batches(model))
...     check_per_example_grad(model, x, y)

What the strategies draw prints as code, so that a failing test ends with a small model to paste. The strategies need
hypothesis, which `pip install "pexgrad[test]"` brings; the checks do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api import per_example_jacobian, per_example_value_and_grad
from .base import trees
from .definition.agreement import doubled, refuse_difference
from .errors import PexgradError, VerificationError
from .extend import check_rule
from .inputs.torch_losses import Loss

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

CLASSES = 3  # of the models' outputs
CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _strategies() -> Any:
    try:
        # imported here, so that the checks work without it
        import hypothesis.strategies
    except ModuleNotFoundError as error:
        raise PexgradError(
            'the strategies of pexgrad.testing need hypothesis: pip install "pexgrad[test]"'
        ) from error
    return hypothesis.strategies


# --- checks ---------------------------------------------------------------------------------------


def check_per_example_grad(
    model: nn.Module | ModelConfig | ConvConfig | LinearConfig,
    x: Any,
    y: Any = None,
    loss: Loss = F.cross_entropy,
    *,
    tolerance: float = 1e-8,
) -> None:
    """Raise where the library's answers for a model are not those of the definition, a loop over batches of one.

    >>> check_per_example_grad(torch.nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))

    A copy of the model is converted to float64. Losses and rows are compared with the loop; norms, products, weighted
    and clipped sums with what those rows give.

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


# --- layers ---------------------------------------------------------------------------------------


class _Code:
    """What hypothesis prints as code that makes it, and not by its fields."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class ConvConfig(_Code):
    """A convolution and the size of its input; its `repr` is code that makes the layer."""

    batch: int
    channels: tuple[int, int]
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    padding_mode: str = "zeros"

    def __repr__(self) -> str:
        return repr(self._layer())

    def _layer(self) -> Layer:
        n = len(self.size)
        given = {
            "stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups,
            "bias": self.bias, "padding_mode": self.padding_mode,
        }  # fmt: skip
        usual = {
            "stride": [(1,) * n], "padding": [(0,) * n, "valid"], "dilation": [(1,) * n], "groups": [1], "bias": [True],
            "padding_mode": ["zeros"],
        }  # fmt: skip
        kwargs = tuple((k, v) for k, v in given.items() if v not in usual[k])
        return Layer(CONV[n - 1].__name__, (*self.channels, self.kernel), kwargs)

    def module(self) -> nn.Module:
        """The layer, always with the same weights."""
        return _seeded(self._layer().module)

    def build(self) -> tuple[nn.Module, Tensor]:
        """The layer and an input (B, C, *S)."""
        return self.module(), _seeded(lambda: torch.randn(self.batch, self.channels[0], *self.size))


@dataclass(frozen=True, repr=False)
class LinearConfig(_Code):
    """A linear layer and the leading dimensions of its input, the batch first; its `repr` is code that makes the layer."""

    batch: int
    positions: tuple[int, ...]
    features: tuple[int, int]
    bias: bool

    def __repr__(self) -> str:
        return repr(Layer("Linear", self.features, () if self.bias else (("bias", False),)))

    def module(self) -> nn.Module:
        """The layer, always with the same weights."""
        return _seeded(lambda: nn.Linear(*self.features, bias=self.bias))

    def build(self) -> tuple[nn.Module, Tensor]:
        """The layer and an input (B, *T, I)."""
        return self.module(), _seeded(lambda: torch.randn(self.batch, *self.positions, self.features[0]))


def _seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """What `make` gives from this seed, with the global generator left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def conv_configs() -> SearchStrategy[ConvConfig]:
    """Convolutions with 1 to 3 spatial dimensions and every argument; the output is never empty.

    >>> @given(conv_configs())
    ... def test(config):
    ...     layer, x = config.build()
    ...     check_per_example_grad(config, x, loss=lambda output, _: output.square().flatten(1).sum(1))
    """
    return _strategies().composite(_draw_conv)()


def _draw_conv(draw: DrawFn) -> ConvConfig:
    st = _strategies()
    n = draw(st.sampled_from([1, 2, 3]))

    def each(elements: Any) -> tuple[int, ...]:
        return tuple(draw(elements) for _ in range(n))

    kernel, dilation, stride = (
        each(_up_to((4, 3, 2)[n - 1])),
        each(_up_to(3 if n < 3 else 2)),
        each(_up_to(3)),
    )
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
    return ConvConfig(
        draw(_up_to(4)), channels, size, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode
    )


def linear_configs() -> SearchStrategy[LinearConfig]:
    """Linear layers with up to three leading dimensions besides the batch, with and without a bias."""
    st = _strategies()
    positions = st.lists(st.integers(1, 4), max_size=3).map(tuple)
    return st.builds(LinearConfig, _up_to(5), positions, st.tuples(_up_to(5), _up_to(5)), st.booleans())


def _up_to(largest: int) -> SearchStrategy[int]:
    return _strategies().integers(1, largest)


# --- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer(_Code):
    """A layer of torch.nn as code."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)]
        return f"nn.{self.name}({', '.join(arguments)})"

    def module(self) -> nn.Module:
        """The layer itself."""
        return getattr(nn, self.name)(*self.args, **dict(self.kwargs))


@dataclass(frozen=True)
class ModelConfig(_Code):
    """A small classifier of examples of one shape; its `repr` is code that makes it."""

    layers: tuple[Layer, ...]
    shape: tuple[int, ...]  # of one example
    vocabulary: int | None = None  # examples are token ids below it, and not numbers

    def __repr__(self) -> str:
        return f"nn.Sequential({', '.join(map(repr, self.layers))})"

    def module(self) -> nn.Module:
        """The model, always with the same weights."""
        return _seeded(lambda: nn.Sequential(*(layer.module() for layer in self.layers)))

    def batch(self, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """x (size, *shape) and labels (size,)."""

        def draw() -> tuple[Tensor, Tensor]:
            if self.vocabulary is None:
                x = torch.randn(size, *self.shape, dtype=torch.float64)
            else:
                x = torch.randint(self.vocabulary, (size, *self.shape))
            return x, torch.randint(CLASSES, (size,))

        return _seeded(draw, seed)


def models(
    kinds: tuple[str, ...] = ("vector", "image", "tokens"), max_layers: int = 4
) -> SearchStrategy[ModelConfig]:
    """Small classifiers: linear and convolutional layers, embeddings, norms, activations and pooling in any order.

    Args:
        kinds: of the examples: `"vector"` (I,), `"image"` (C, H, W), `"tokens"` (T,) of ids.
        max_layers: before the last linear layer.
    """
    return _strategies().composite(_draw_model)(kinds, max_layers)


def _draw_model(draw: DrawFn, kinds: tuple[str, ...], max_layers: int) -> ModelConfig:
    st = _strategies()
    kind = draw(st.sampled_from(kinds))
    layers: list[Layer] = []
    vocabulary = None
    if kind == "tokens":
        vocabulary, width = draw(_up_to(5)), draw(_up_to(4))
        shape: tuple[int, ...] = (draw(_up_to(4)),)
        layers.append(Layer("Embedding", (vocabulary, width)))
        inner = (*shape, width)
    else:
        shape = inner = (
            (draw(_up_to(5)),)
            if kind == "vector"
            else (draw(_up_to(2)), *(draw(st.integers(2, 5)) for _ in "hw"))
        )
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
    return Layer(draw(_strategies().sampled_from(["Tanh", "Softplus", "GELU"])))


def _linear(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    bias = draw(_strategies().booleans())
    return Layer("Linear", (shape[-1], draw(_up_to(4))), () if bias else (("bias", False),))


def _layer_norm(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    return Layer("LayerNorm", (shape[-1],))


def _conv(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    st = _strategies()
    kernel, stride, padding = draw(_up_to(min(shape[1:]))), draw(_up_to(2)), draw(st.integers(0, 1))
    groups = draw(st.sampled_from(sorted({1, shape[0]})))
    given = {"stride": stride, "padding": padding, "groups": groups}
    usual = {"stride": 1, "padding": 0, "groups": 1}
    kwargs = tuple((k, v) for k, v in given.items() if v != usual[k])
    return Layer("Conv2d", (shape[0], groups * draw(_up_to(2)), kernel), kwargs)


def _group_norm(draw: DrawFn, shape: tuple[int, ...]) -> Layer:
    # torch refuses to normalise a single number
    groups = [g for g in sorted({1, shape[0]}) if torch.Size(shape).numel() > g]
    if not groups:
        return _activation(draw, shape)
    return Layer("GroupNorm", (draw(_strategies().sampled_from(groups)), shape[0]))


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
    st = _strategies()
    return st.builds(model.batch, _up_to(max_size), st.integers(0, 99))


def parameters(model: nn.Module | ModelConfig, max_scale: float = 2.0) -> SearchStrategy[dict[str, Tensor]]:
    """Values for a model's parameters, by name: normal numbers of a drawn scale, in the parameters' own dtypes.

    >>> @given(parameters(torch.nn.Linear(3, 2)))
    ... def test(params):
    ...     assert params["weight"].shape == (2, 3)
    """
    st = _strategies()
    module = model.module().double() if isinstance(model, ModelConfig) else model
    shapes = {k: p.detach() for k, p in module.named_parameters()}

    def draw(seed: int, scale: float) -> dict[str, Tensor]:
        return _seeded(lambda: {k: torch.randn_like(p) * scale for k, p in shapes.items()}, seed)

    return st.builds(draw, st.integers(0, 99), st.sampled_from([max_scale / 2, max_scale / 20, max_scale]))


__all__ = [
    "ConvConfig", "LinearConfig", "ModelConfig", "batches", "check_per_example_grad", "check_rule", "conv_configs",
    "linear_configs", "models", "parameters",
]  # fmt: skip
