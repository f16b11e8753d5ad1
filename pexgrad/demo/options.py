"""What can be chosen on the command line of the demo. Needs nothing but the standard library."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUMMARY = "train a small CNN on handwritten digits, with and without differential privacy"

PARSER: dict[str, Any] = {
    "description": "Train a small CNN on the 1,797 handwritten digits that scikit-learn ships, by DP-SGD "
    "(Abadi et al. 2016): Poisson-sampled batches, each example's gradient clipped, Gaussian noise on the sum. "
    "Beside it, the same run without privacy.",
    "formatter_class": argparse.ArgumentDefaultsHelpFormatter,
}


@dataclass(frozen=True)
class Options:
    """The settings of one run.

    The defaults were tuned on a validation part of the training examples, never on the test examples. That
    search looked at the data too; a real release has to account for it, the demo does not.
    """

    epochs: float = 30.0
    batch_size: int = 256
    max_norm: float = 1.0
    noise_multiplier: float = 3.4
    delta: float = 1e-5
    learning_rate: float = 0.2
    momentum: float = 0.9
    seed: int | None = None


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare the options on `parser`."""

    def option(name: str, kind: Callable[[str], Any], help: str) -> None:
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=help)

    option("epochs", positive(float), "how often each training example is drawn, on average")
    option("batch-size", positive(int), "expected number of examples in a batch; the sizes vary around it")
    option("max-norm", positive(float), "C: a longer per-example gradient is scaled down to this norm")
    option("noise-multiplier", positive(float), "standard deviation of the noise on the sum, in units of C")
    option("delta", positive(float), "delta of the (epsilon, delta) guarantee")
    option("learning-rate", positive(float), "step size of both runs")
    option("momentum", float, "momentum of both runs")
    option(
        "seed", int, "repeat a run exactly; without it, every random number comes from the system's entropy"
    )


def read(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Options:
    """The parsed options, or the usual exit with a message if they make no sense together."""
    options = Options(**{name: getattr(parsed, name) for name in Options.__dataclass_fields__})
    if not options.delta < 1:
        parser.error(f"--delta is {options.delta}, and has to be below 1")
    if not 0 <= options.momentum < 1:
        parser.error(f"--momentum is {options.momentum}, and has to lie in [0, 1)")
    return options


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of numbers above zero."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a positive, finite number")
        return value

    parse.__name__ = kind.__name__  # argparse names it when the text is no number at all
    return parse
