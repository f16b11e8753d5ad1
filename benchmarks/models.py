"""The models that are measured, as cases: how to build one, and how to draw a batch of random inputs for it.

Dropout and stochastic depth are 0 everywhere, so that all contenders compute the same numbers. Shapes: `b` batch,
`t` positions, `c` channels, `v` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


def image_losses(output: Tensor, y: Tensor) -> Tensor:
    """(b, classes), (b,) -> (b,)"""
    return F.cross_entropy(output, y, reduction="none")


def token_losses(output: Tensor, y: Tensor) -> Tensor:
    """(b, t, v), (b, t) -> (b,): the mean over an example's positions"""
    return F.cross_entropy(output.transpose(1, 2), y, reduction="none").mean(1)


@dataclass(frozen=True)
class Case:
    """A model and the batches it takes: `build()` is the module, `draw(b)` one batch `(x, y)`."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    losses: Callable[[Tensor, Tensor], Tensor] = image_losses


def images(name: str, build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int = CLASSES) -> Case:
    """A classifier of `shape` = (c, height, width), or any other one-example shape."""
    return Case(name, build, lambda b: (torch.randn(b, *shape), torch.randint(classes, (b,))))


def tokens(name: str, build: Callable[[], nn.Module], vocabulary: int, t: int) -> Case:
    """A classifier of sequences of t tokens."""
    return Case(name, build, lambda b: (torch.randint(vocabulary, (b, t)), torch.randint(CLASSES, (b,))))


def language(name: str, build: Callable[[], nn.Module], vocabulary: int, t: int) -> Case:
    """A language model, asked for the next token at each of t positions."""

    def draw(b: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (b, t + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Case(name, build, draw, token_losses)


# ---------------------------------------------------------------- the paper's networks


def toy_cnn(layers: int, rate: float, kernel: int, channels: int = 25, size: int = 256) -> nn.Sequential:
    """Section 4.1 of the paper: channels grow by `rate` from layer to layer; padding is 2 whatever the kernel."""
    widths = [3, *(int(channels * rate**i) for i in range(layers))]
    modules: list[nn.Module] = []
    for i, (c, d) in enumerate(pairwise(widths)):
        modules += [nn.Conv2d(c, d, kernel, padding=2), nn.ReLU()]
        size += 5 - kernel
        if i % 2:
            modules.append(nn.MaxPool2d(2))
            size //= 2
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(widths[-1] * size**2, CLASSES))


def toy(layers: int, rate: float, kernel: int, channels: int = 25, size: int = 256) -> Case:
    name = f"toy CNN, {layers} layers, rate {rate:g}, kernel {kernel}, {channels} channels, {size}px"
    return images(name, partial(toy_cnn, layers, rate, kernel, channels, size), (3, size, size))


def vision(title: str, builder: str, size: int, **options: object) -> Case:
    """A torchvision model with its 1,000 classes, at `size` x `size` pixels."""
    import torchvision.models as zoo

    return images(
        f"{title}, {size}px", partial(getattr(zoo, builder), **options), (3, size, size), classes=1000
    )


def alexnet(size: int) -> Case:
    return vision("AlexNet", "alexnet", size, dropout=0.0)


def vgg16(size: int) -> Case:
    return vision("VGG16", "vgg16", size, dropout=0.0)


# ---------------------------------------------------------------- convolutional networks of today


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels), channels)


def resnet(depth: int, size: int) -> Case:
    return vision(f"GroupNorm ResNet-{depth}", f"resnet{depth}", size, norm_layer=group_norm)


def convnext_tiny(size: int) -> Case:
    """With layer scales of 0.1: from the usual 1e-6 a check would see next to no gradient inside the blocks."""
    return vision("ConvNeXt-T", "convnext_tiny", size, stochastic_depth_prob=0.0, layer_scale=0.1)


def mnist_cnn(size: int) -> Case:
    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (size // 2) ** 2, 64),
            nn.ReLU(),
            nn.Linear(64, CLASSES),
        )

    return images("MNIST-size CNN", build, (1, size, size))


def mlp(width: int = 256) -> Case:
    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(784, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    return images(f"MLP, 3 layers of {width}", build, (784,))


# ---------------------------------------------------------------- transformers and recurrent networks


def vit_small(size: int) -> Case:
    from torchvision.models import VisionTransformer

    shape = {"patch_size": 16, "num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    return images(
        f"ViT-S/16, {size}px", partial(VisionTransformer, size, **shape), (3, size, size), classes=1000
    )


def swin_tiny(size: int) -> Case:
    from torchvision.models import SwinTransformer

    shape = {"patch_size": [4, 4], "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}
    build = partial(SwinTransformer, **shape, window_size=[7, 7], stochastic_depth_prob=0.0)
    return images(f"Swin-T, {size}px", build, (3, size, size), classes=1000)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class PreNormBlock(nn.Module):
    """GPT-2's order: normalise, transform, add."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal=True)
        self.norm2, self.mlp = nn.LayerNorm(width), feed_forward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNormBlock(nn.Module):
    """BERT's order: transform, add, normalise."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, causal=False), nn.LayerNorm(width)
        self.mlp, self.norm2 = feed_forward(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


def positions(ids: Tensor) -> Tensor:
    """(b, t): one line of positions for each example, so that contenders that hook the embedding see a batch."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


class GPT(nn.Module):
    """A GPT-2: learned positions, pre-norm blocks, the head's weight tied to the token embedding's."""

    def __init__(self, vocabulary: int, t: int, width: int, layers: int, heads: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(t, width)
        self.blocks = nn.Sequential(*(PreNormBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(positions(ids)))))


class BERT(nn.Module):
    """A BERT encoder that classifies from the first token, through the usual pooler."""

    def __init__(self, vocabulary: int, t: int, width: int, layers: int, heads: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(t, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(PostNormBlock(width, heads) for _ in range(layers)))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.token(ids) + self.position(positions(ids))))
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class TextLSTM(nn.Module):
    """Embedding, two LSTM layers, a classifier on the last step."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, 64)
        self.lstm = nn.LSTM(64, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(ids))[0][:, -1])


def gpt(t: int, layers: int, width: int, heads: int, vocabulary: int, name: str) -> Case:
    return language(f"{name}, T={t}", partial(GPT, vocabulary, t, width, layers, heads), vocabulary, t)


def gpt2_small(t: int) -> Case:
    return gpt(t, layers=12, width=768, heads=12, vocabulary=50257, name="GPT-2-small shape")


def gpt_4_layers(t: int) -> Case:
    return gpt(t, layers=4, width=256, heads=4, vocabulary=10_000, name="GPT, 4 layers of 256, 10k tokens")


def bert_base(t: int) -> Case:
    return tokens(f"BERT-base shape, T={t}", partial(BERT, 30522, t, 768, 12, 12), 30522, t)


def lstm(t: int) -> Case:
    return tokens(f"LSTM, 2 layers of 256, T={t}", partial(TextLSTM, 1000, 256), 1000, t)
