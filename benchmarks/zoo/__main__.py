"""Run the members of the zoo that have no result yet, and write the page.

    python -m benchmarks.zoo                       everything that is missing
    python -m benchmarks.zoo torchvision/resnet    members whose name contains this
    python -m benchmarks.zoo --again timm          run these again
    python -m benchmarks.zoo --again --failed      run again what was not exact
    python -m benchmarks.zoo --page                only write docs/zoo.md

A worker process checks one member after the other and is replaced when it dies or takes too long.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.zoo import from_timm, from_torchvision, from_transformers, page
from benchmarks.zoo.member import Member

RESULTS = Path(__file__).parent.parent / "results" / "zoo.json"
LIMIT = 900  # seconds for one member
SOURCES = {"torchvision": from_torchvision, "timm": from_timm, "transformers": from_transformers}
DONE = "zoo-result "  # what a worker's answers start with


def zoo() -> dict[str, Member]:
    installed = [m for name, m in SOURCES.items() if importlib.util.find_spec(name)]
    return {f"{m.source}/{m.name}": m for module in installed for m in module.members()}


class Worker:
    """A process that checks the members whose names it is given."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo", "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def check(self, name: str, limit: float) -> dict[str, Any] | str:
        """The record, or why there is none."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while selector.select(limit):
                line = self.process.stdout.readline().decode()
                if line.startswith(DONE):
                    return json.loads(line.removeprefix(DONE))
                if not line:
                    return f"the process ended with {self.process.wait()}"
        self.process.kill()
        return f"took more than {limit} s"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def work() -> None:
    """The worker's loop."""
    import torch

    from benchmarks.zoo.check import check

    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_default_dtype(torch.float64)  # code that makes constants of its own makes them of this dtype
    members = zoo()
    for line in sys.stdin:
        record = check(members[line.strip()])
        print(DONE + json.dumps(record), flush=True)


def run(names: list[str], members: dict[str, Member], data: dict[str, Any], limit: float) -> None:
    from benchmarks.zoo.check import record_of_exit

    worker = Worker()
    for i, name in enumerate(names):
        answer = worker.check(name, limit)
        if isinstance(answer, str):
            worker.close()
            worker = Worker()
            answer = record_of_exit(members[name], answer)
        data["models"][name] = answer
        save(data)
        print(
            f"[{i + 1}/{len(names)}] {name}: {answer['verdict']} {answer.get('trace_s', '')} {answer.get('why', '')}",
            flush=True,
        )
    worker.close()


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "models": {}}


def save(data: dict[str, Any]) -> None:
    data["versions"] = {
        name: importlib.metadata.version(name)
        for name in ("torch", *SOURCES)
        if importlib.util.find_spec(name)
    }
    RESULTS.parent.mkdir(exist_ok=True)
    draft = RESULTS.with_suffix(".tmp")
    draft.write_text(json.dumps(data, indent=1) + "\n")
    draft.replace(RESULTS)


def selected(options: argparse.Namespace, members: dict[str, Member], done: dict[str, Any]) -> Iterator[str]:
    for name in members:
        if options.names and not any(n in name for n in options.names):
            continue
        if name in done and not options.again:
            continue
        if options.failed and done.get(name, {}).get("verdict") == "exact":
            continue
        yield name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--failed", action="store_true", help="leave out what was exact")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one member")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    members, data = zoo(), load()
    data["models"] = {k: r for k, r in data["models"].items() if k in members or not members}
    if not options.page:
        run(list(selected(options, members, data["models"])), members, data, options.limit)
    page.write(data)


if __name__ == "__main__":
    main()
