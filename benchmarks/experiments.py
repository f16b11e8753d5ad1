"""What is measured: an experiment is a list of points, a point is a case, a batch size and kinds of work.

`small` is for a CPU, `full` is the paper's size, or one that fills a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks import models
from benchmarks.models import Case

PAPER = ("plain", "naive", "multi", "crb grouped")
RULES = ("crb grouped", "crb unfold", "crb loop")
PEERS = ("vmap(grad)", "Opacus", "Opacus ghost", "BackPACK", "ExpandedWeights", "JAX vmap(grad)+jit")
ROW_PEERS = tuple(name for name in PEERS if name != "Opacus ghost")

ROWS = {"rows": ("plain", "naive", "multi", "crb", *RULES, "crb out=", *ROW_PEERS)}
CLIPPED = {"clipped": ("plain", "naive", "crb", *PEERS)}
ALL_WORK = {
    "rows": ("plain", "naive", "multi", "crb", "crb out=", *ROW_PEERS),
    "norms": ("plain", "crb", *PEERS),
    "clipped": ("plain", "crb", *PEERS),
}


@dataclass(frozen=True)
class Point:
    """`work` maps each kind of work to its contenders; `axes` are the coordinates of a plot."""

    case: Case
    batch: int
    work: dict[str, tuple[str, ...]]
    axes: dict[str, float] = field(default_factory=dict)

    def key(self, work: str) -> str:
        return f"{self.case.name} | B={self.batch} | {work}"


@dataclass(frozen=True)
class Experiment:
    title: str
    about: str
    points: Callable[[str], list[Point]]


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(
    name: str, title: str
) -> Callable[[Callable[[str], list[Point]]], Callable[[str], list[Point]]]:
    """Registers the function of a size that lists the points; its docstring is the text above the results."""

    def register(points: Callable[[str], list[Point]]) -> Callable[[str], list[Point]]:
        EXPERIMENTS[name] = Experiment(title, " ".join((points.__doc__ or "").split()), points)
        return points

    return register


# ---------------------------------------------------------------- the paper

RATES = {2: (1, 2, 4, 8, 16), 3: (1, 2, 3, 4, 5), 4: (1, 1.75, 2.5, 3.25, 4)}
CURVES = {"rows": (*PAPER, "crb", "vmap(grad)", "Opacus", "BackPACK", "JAX vmap(grad)+jit")}


def channel_rates(kernel: int, size: str) -> list[Point]:
    pixels = {"small": 64, "full": 256}[size]
    return [
        Point(models.toy(layers, rate, kernel, size=pixels), 8, CURVES, {"layers": layers, "rate": rate})
        for layers, rates in RATES.items()
        for rate in rates
    ]


@experiment("fig1", "Figure 1: channel rate, kernel 3")
def fig1(size: str) -> list[Point]:
    """Rows for batches of 8 through 2, 3 and 4 convolutional layers, 25 channels in the first and `rate` times more in
    each next one, kernel 3, ReLU after each convolution and max-pooling after every second. Inputs are 3 x 256 x 256
    (full) or 3 x 64 x 64 (small).
    """
    return channel_rates(3, size)


@experiment("fig2", "Figure 2: batch size")
def fig2(size: str) -> list[Point]:
    """Rows over the batch size, 3 convolutional layers, rate 1, kernel 5. The first layer has 256 channels and inputs
    are 3 x 256 x 256 (full), or 64 channels and 3 x 64 x 64 (small).
    """
    channels, pixels = {"small": (64, 64), "full": (256, 256)}[size]
    case = models.toy(3, 1, 5, channels, pixels)
    return [Point(case, batch, CURVES, {"batch": batch}) for batch in (3, 5, 7, 9, 11, 13, 15)]


@experiment("fig3", "Figure 3: channel rate, kernel 5")
def fig3(size: str) -> list[Point]:
    """As Figure 1, with kernel 5."""
    return channel_rates(5, size)


@experiment("table1", "Table 1: AlexNet and VGG16")
def table1(size: str) -> list[Point]:
    """Rows for AlexNet at batch 16 and VGG16 at batch 8 (full) or 4 (small). Inputs are 3 x 256 x 256 (full), or
    3 x 256 x 256 for AlexNet and 3 x 128 x 128 for VGG16 (small).
    """
    pixels, batch = {"small": (128, 4), "full": (256, 8)}[size]
    return [Point(models.alexnet(256), 16, ROWS), Point(models.vgg16(pixels), batch, ROWS)]


# ---------------------------------------------------------------- beyond the paper

MODERN = [  # (case of a size or length, (small size, batch), (full size, batch))
    (partial(models.resnet, 18), (96, 8), (224, 128)),
    (partial(models.resnet, 50), (96, 4), (224, 64)),
    (models.convnext_tiny, (96, 4), (224, 64)),
    (models.vit_small, (96, 8), (224, 128)),
    (models.swin_tiny, (112, 4), (224, 64)),
    (models.gpt2_small, (64, 2), (256, 16)),
    (models.bert_base, (64, 2), (256, 16)),
    (models.mnist_cnn, (28, 64), (28, 2048)),
    (models.mlp, (256, 32), (1024, 1024)),
    (models.lstm, (32, 32), (128, 256)),
]

FULL_WORK = {  # fewer contenders, to end in minutes
    "rows": ("plain", "crb", "crb out=", *ROW_PEERS),
    "norms": ("plain", "crb", "Opacus ghost"),
    "clipped": ("plain", "crb", "vmap(grad)", "Opacus ghost"),
}


@experiment("modern", "Models of today")
def modern(size: str) -> list[Point]:
    """Rows, norms and clipped sums. No model has batch norm (the ResNets have group norm), dropout is 0."""
    chosen, work = {"small": (1, ALL_WORK), "full": (2, FULL_WORK)}[size]
    return [Point(entry[0](entry[chosen][0]), entry[chosen][1], work) for entry in MODERN]


@experiment("clipped", "Clipped sums")
def clipped(size: str) -> list[Point]:
    """The gradient of differentially private training before the noise, beside an ordinary backward. The sizes are the
    same on every device, but for a batch that is 8 times as large in full.
    """
    times, work = {"small": (1, CLIPPED), "full": (8, {"clipped": FULL_WORK["clipped"]})}[size]
    cases = [
        (models.alexnet(224), 16),
        (models.vgg16(128), 4),
        (models.resnet(18, 96), 8),
        (models.gpt_4_layers(128), 8),
        (models.mnist_cnn(28), 64),
    ]
    return [Point(case, times * batch, work) for case, batch in cases]


SCALED = {
    "rows": ("plain", "crb", "crb out=", "vmap(grad)", "Opacus", "JAX vmap(grad)+jit"),
    "clipped": ("plain", "crb", "vmap(grad)", "Opacus ghost", "JAX vmap(grad)+jit"),
}


@experiment("scaling", "Scaling")
def scaling(size: str) -> list[Point]:
    """A 3-layer network with kernel 3, and one thing that grows: the batch, the image, the channels; and a 4-layer GPT
    whose sequences grow.
    """
    times = {"small": 1, "full": 4}[size]
    batches, sizes, widths, lengths = (1, 4, 16, 64), (16, 32, 64, 128), (8, 16, 32, 64), (16, 64, 256)
    return [
        *(Point(models.toy(3, 1, 3, 25, 32), times * b, SCALED, {"batch": times * b}) for b in batches),
        *(Point(models.toy(3, 1, 3, 25, s), times * 8, SCALED, {"image size": s}) for s in sizes),
        *(Point(models.toy(3, 1, 3, c, 32), times * 8, SCALED, {"channels": c}) for c in widths),
        *(Point(models.gpt_4_layers(t), times * 2, SCALED, {"sequence length": t}) for t in lengths),
    ]


@experiment("first-call", "The first call")
def first_call(size: str) -> list[Point]:
    """Seconds until the first answer, tracing and compiling included; a call at the next, new batch size; and a call
    after that, for comparison.
    """
    contenders = {"rows": ("plain", "crb", "vmap(grad)", "Opacus", "JAX vmap(grad)+jit")}
    cases = [(entry[0](entry[1][0]), entry[1][1]) for entry in MODERN]
    return [Point(case, batch, contenders) for case, batch in [(models.alexnet(224), 4), *cases]]
