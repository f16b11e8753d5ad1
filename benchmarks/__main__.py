"""The command line: `python -m benchmarks table1 --device cpu --size small --threads 2`."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

from benchmarks.results import FOLDER

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    arguments = parse()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # failed traces are results here, not news
    if arguments.command == "report":
        from benchmarks.report import write

        write(arguments.results, arguments.docs)
    else:
        measure(arguments)


def parse() -> argparse.Namespace:
    from benchmarks.experiments import EXPERIMENTS

    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, experiment in EXPERIMENTS.items():
        add_options(commands.add_parser(name, help=experiment.title, description=experiment.about))
    device_check = "every rule on the device, float32 without TF32, against a float64 CPU reference"
    add_options(commands.add_parser("check", help=device_check, description=device_check))
    fit = "time convolution rules on many shapes, and fit the prices behind conv_rule='auto'"
    add_options(commands.add_parser("fit", help=fit, description=fit))
    report = commands.add_parser("report", help="write docs/benchmarks.md and its plots from the results")
    add_results(report)
    report.add_argument("--docs", type=Path, default=DOCS, help="folder to write into (default: docs)")
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--device", choices=("cpu", "cuda"), default="cpu")
    option("--size", choices=("small", "full"), help="default: small on a CPU, full on a GPU")
    option("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all, %(default)s)")
    option("--repeats", type=int, default=10, help="timed samples a contender (default: %(default)s)")
    option("--budget", type=float, default=20, help="seconds of samples a contender, if it has three")
    option("--minutes", type=float, default=float("inf"), help="start no further point after so many minutes")
    option(
        "--only",
        action="append",
        default=[],
        help="part of `case | B=batch | work | contender`, or parts with commas; repeat to narrow",
    )
    option("--tf32", action="store_true", help="let a GPU round products to TF32")
    option("--keep", action="store_true", help="keep points that another version or setting measured")
    option("--fresh", action="store_true", help="measure everything anew")
    add_results(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of JSON files (default: here)")


def measure(arguments: argparse.Namespace) -> None:
    import torch

    from benchmarks import environment, memory
    from benchmarks.results import Results
    from benchmarks.runner import Options, run
    from benchmarks.tables import tables

    device = torch.device(arguments.device)
    environment.prepare(device, arguments.threads, arguments.tf32)
    if device.type == "cpu":
        memory.stay_within_free_memory()
    size = arguments.size or {"cpu": "small", "cuda": "full"}[device.type]
    tf32 = "-tf32" if arguments.tf32 else ""
    path = (
        arguments.results
        / f"{environment.slug(device, arguments.threads)}{tf32}-{arguments.command}-{size}.json"
    )
    if arguments.fresh:
        path.unlink(missing_ok=True)
    if arguments.command == "check":
        from benchmarks.device_check import run_checks

        return run_checks(device, path, arguments.minutes)
    if arguments.command == "fit":
        from benchmarks.fit import run_fit

        return run_fit(device, path)
    results = Results(path, arguments.command, size, environment.describe(device))
    options = Options(
        device,
        size,
        arguments.repeats,
        arguments.budget,
        arguments.minutes,
        tuple(arguments.only),
        arguments.keep,
    )
    print(tables(arguments.command, list(run(arguments.command, results, options).values())))


if __name__ == "__main__":
    main()
