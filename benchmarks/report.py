"""`docs/benchmarks.md` and its plots, written from the JSON files and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import plots, published
from benchmarks.experiments import EXPERIMENTS
from benchmarks.results import load_all
from benchmarks.tables import markdown, ratio, tables

PLOTS = "benchmarks"

Record = dict[str, Any]

INTRODUCTION = """# Benchmarks

<!-- Written by `python -m benchmarks report` from `benchmarks/results/*.json`; edit neither by hand. -->

Every strategy of this library beside every peer, on one machine, in one process. Each contender is checked against a
loop over the examples before it is timed, by kind of work; one that refuses a model, or answers wrongly, says so below
the table. Samples are interleaved: in each round every contender takes one, and each round starts with another. A
sample is as many calls in a row as last about 20 ms. Warm-up (tracing and compiling included) is not in the times, but
has a table of its own. *Plain* is the ordinary backward, which gives only the sum of the gradients.

What each contender is asked for:

- **rows**: the gradient of every example, `(B, *shape)` a parameter. `crb out=` writes them into the last call's
  buffers; all others get fresh memory each time.
- **norms**: the norm of every example's gradient.
- **clipped**: the sum of the examples' gradients, each clipped to the median norm. Contenders that only build rows
  build them, and clip.

Peak memory is what a call needs at its worst moment on top of parameters and inputs, its result included: the
allocator's count on a GPU, the kernel's peak resident set on a CPU. Contenders with module hooks get models whose
in-place activations and additions were made out of place, since they refuse those; JAX gets the models that are stacks
of convolutions and linear layers. Everything is float32 and random: inputs, labels and weights.
"""


def write(results: Path, docs: Path) -> None:
    files = load_all(results)
    (docs / PLOTS).mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks.md").write_text("\n\n".join(page(files, docs)) + "\n")
    print(f"{docs / 'benchmarks.md'}: {len(files)} result files")


def page(files: list[Record], docs: Path) -> Iterator[str]:
    yield INTRODUCTION.rstrip()
    yield from paper(files)
    for name, experiment in EXPERIMENTS.items():
        found = [data for data in files if data["experiment"] == name and data["points"]]
        if found:
            yield f"## {experiment.title}"
            yield experiment.about
        for data in found:
            yield from section(data, docs)
    yield from choices(files)
    yield from checks(files)


def section(data: Record, docs: Path) -> Iterator[str]:
    yield f"### {data['device']}, {data['size']}"
    yield "\n\n".join(dict.fromkeys(map(setting, data["environments"].values())))
    plot = f"{PLOTS}/{slug(data)}.svg"
    if plots.draw(data, docs / plot):
        yield f"![{EXPERIMENTS[data['experiment']].title}, {data['device']}]({plot})"
    yield tables(data["experiment"], list(data["points"].values()))


def slug(data: Record) -> str:
    environment = next(iter(data["environments"].values()))
    words = f"{data['experiment']} {data['size']} {data['device']} {environment['threads']}"
    words += " tf32" if environment["tf32"] else ""
    return "-".join("".join(c if c.isalnum() else " " for c in words.lower()).split())


def setting(environment: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    tf32 = {None: "", True: ", TF32 on", False: ", TF32 off"}[environment["tf32"]]
    hardware = f"{environment['device']}, {environment['threads']} CPU threads, {environment['dtype']}{tf32}"
    return f"{hardware}; Python {environment['python']}, {versions}."


# ---------------------------------------------------------------- the paper beside the measurements


def paper(files: list[Record]) -> Iterator[str]:
    yield "## The paper's numbers, then and now"
    yield (
        "Rochette, Manoel & Tramel, [*Efficient Per-Example Gradient Computations in Convolutional Neural "
        "Networks*](https://arxiv.org/abs/1912.06015), Table 1: 20 batches on an NVIDIA P100 with PyTorch 1.1, as "
        "times over the ordinary backward's, beside ours. Theirs are of whole steps of private training (rows, "
        "clipping, noise, update), ours of the rows. `crb grouped` is the paper's rule; `crb` chooses a rule for each "
        "layer."
    )
    found = [
        data for data in files if data["experiment"] in ("table1", "fig1", "fig2", "fig3") and data["points"]
    ]
    yield ratios([data for data in found if data["experiment"] == "table1"])
    yield from conclusions(found)


def ratios(measured: list[Record]) -> str:
    columns = [(data, published.times_of(list(data["points"].values()))) for data in measured]
    header = ["", "published (P100)", *(f"{data['device']}, {data['size']}" for data, _ in columns)]
    names = [(m, s) for m in published.TABLE1 for s in (*published.STRATEGIES, "crb", "crb out=")]
    return markdown(header, [ratios_line(model, name, columns) for model, name in names])


def ratios_line(model: str, name: str, columns: list) -> list[str]:
    then = published.ratio(model, name) if name in published.STRATEGIES else None
    now = [published.quotient(times(name, model), times("plain", model)) for _, times in columns]
    return [f"{model}, `{name}` / plain", ratio(then), *map(ratio, now)]


def conclusions(found: list[Record]) -> Iterator[str]:
    yield "What the paper concludes, and whether it holds on each device:"
    settings = dict.fromkeys((data["device"], data["size"]) for data in found)
    lines = [
        [text, f"{device}, {size}", *verdict(found, experiment, test, device, size)]
        for experiment, text, test in published.CONCLUSIONS
        for device, size in settings
    ]
    yield markdown(["conclusion", "device", "holds", "measured"], lines)


def verdict(found: list[Record], experiment: str, test: Any, device: str, size: str) -> list[str]:
    needed = ("fig1", "fig3") if experiment == "fig3" else (experiment,)
    here = [d for d in found if (d["device"], d["size"]) == (device, size) and d["experiment"] in needed]
    result = test(published.times_of([point for data in here for point in data["points"].values()]))
    return ["not measured", ""] if result is None else ["yes" if result[0] else "no", result[1]]


# ---------------------------------------------------------------- the choice of a convolution's algorithm

AXES = ("batch", "in", "size", "out", "kernel", "stride", "groups")


def choices(files: list[Record]) -> Iterator[str]:
    found = [data for data in files if data["experiment"] == "fit"]
    if found:
        yield "## Convolution algorithms"
        yield (
            "Milliseconds for the rows of one convolution's weight by each algorithm that may be fastest, and what "
            '`conv_rule="auto"` takes: its cost model is fitted to these numbers.'
        )
    for data in found:
        yield f"### {setting(data['environment'])}"
        yield data["summary"]
        names = list(dict.fromkeys(name for point in data["points"] for name in point["seconds"]))
        yield markdown([*AXES, *names, "auto"], [choice_line(point, names) for point in data["points"]])


def choice_line(point: Record, names: list[str]) -> list[str]:
    seconds, fastest = point["seconds"], min(point["seconds"].values())

    def cell(name: str) -> str:
        if name not in seconds:
            return "—"
        return f"**{1e3 * seconds[name]:.2f}**" if seconds[name] == fastest else f"{1e3 * seconds[name]:.2f}"

    return [*map(str, point["shape"]), *map(cell, names), point["chosen"]]


# ---------------------------------------------------------------- correctness on the device


def checks(files: list[Record]) -> Iterator[str]:
    found = [data for data in files if data["experiment"] == "check"]
    if found:
        yield "## Every rule on the device"
        yield "Float32 with TF32 off, relative error against a loop in float64 on the CPU; a rule passes below 1e-4."
    for data in found:
        worst = max(data["cases"].items(), key=lambda item: item[1].get("error", float("inf")))
        failed = [f"{name}: {case['why']}" for name, case in data["cases"].items() if not case["ok"]]
        summary = f"{data['device']}: {len(data['cases']) - len(failed)} of {len(data['cases'])} pass; "
        yield summary + f"the worst is {worst[0]}, {worst[1].get('error', float('inf')):.1e}."
        yield "\n".join(f"- {line}" for line in failed)
