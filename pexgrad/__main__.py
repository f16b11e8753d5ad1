"""The command line: `python -m pexgrad demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pexgrad.demo import options

DEMO_EXTRA = {"dp_accounting", "sklearn", "tqdm"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command named by `argv` and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pexgrad", description="Per-example gradients in PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help=options.SUMMARY, **options.PARSER)
    options.add_to(demo)
    return run_demo(options.read(demo, parser.parse_args(argv)))


def run_demo(chosen: options.Options) -> int:
    """Train and report, or say which extra is missing."""
    try:
        # imported here, so that `--help` needs no extra
        from pexgrad.demo import run
    except ModuleNotFoundError as error:
        if error.name not in DEMO_EXTRA:
            raise
        print(f'The demo needs {error.name}: pip install "pexgrad[demo]"', file=sys.stderr)
        return 1
    run.main(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
