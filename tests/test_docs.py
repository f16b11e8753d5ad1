"""The site and the docstrings: what they show runs, and the site builds without a warning."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pexgrad
from pexgrad.rules import registry

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def sources():
    """Where each module is; the demo's need extras of their own."""
    names = [m.name for m in pkgutil.walk_packages(pexgrad.__path__, "pexgrad.")]
    return {n: Path(importlib.util.find_spec(n).origin) for n in names if not re.search(r"demo|__main__", n)}


def modules():
    """Every module with examples in its docstrings."""
    return [n for n, path in sources().items() if ">>>" in path.read_text(encoding="utf-8")]


@pytest.fixture
def namespace():
    """The names that docstrings take for granted: a model, five examples, their rows, and what goes with them."""
    model = torch.nn.Linear(3, 2)
    params, x, y = dict(model.named_parameters()), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    public = {k: v for k, v in vars(pexgrad).items() if not k.startswith("_")}
    return public | {
        "torch": torch,
        "model": model,
        "models": [torch.nn.Linear(3, 2) for _ in range(4)],
        "params": params,
        "x": x,
        "y": y,
        "grads": pexgrad.per_example_grad(model)(params, x, y),
        "optimiser": torch.optim.SGD(model.parameters(), lr=0.1),
        "data": TensorDataset(torch.randn(1000, 3), torch.randint(2, (1000,))),
        "DataLoader": DataLoader,
    }


@pytest.fixture
def same_rules(monkeypatch):
    """What an example registers is forgotten afterwards."""
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


class Checker(doctest.OutputChecker):
    """A line that shows no output may have any."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


PROPERTIES = {"given": hypothesis.given, "st": hypothesis.strategies}


@pytest.mark.parametrize("name", modules())
def test_docstrings(name, namespace, same_rules):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder().find(module, globs=namespace | PROPERTIES | vars(module)):
        runner.run(test)
    assert runner.tries > 0 and runner.failures == 0


@pytest.mark.parametrize(
    ("library", "title"), [("torch", "torch.func"), ("opacus", "Opacus"), ("jax", "JAX")]
)
@pytest.mark.filterwarnings("ignore")  # of the other library's
def test_the_other_library_gives_the_same_rows(library, title):
    """`docs/coming-from.md`: the block of the other library and the one beside it, after the common start."""
    pytest.importorskip(library)
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    start = next(source for language, source in FENCE.findall(text) if language == "python")
    blocks = FENCE.findall(section)
    assert [language for language, _ in blocks] == ["py", "python"]
    names = {}
    for source in (start, *(source for _, source in blocks)):
        exec(source, names)
    assert names["rows"].keys() == names["ours"].keys()
    for k, row in names["rows"].items():
        theirs = torch.tensor(row.tolist()) if library == "jax" else row
        torch.testing.assert_close(theirs, names["ours"][k], rtol=1e-3, atol=1e-5)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    operations = (tmp_path / "operations" / "index.html").read_text(encoding="utf-8")
    assert "aten.conv2d.default" in operations
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    public = [k for k, v in vars(pexgrad).items() if getattr(v, "__module__", "").startswith("pexgrad.")]
    assert [k for k in public if f'.{k}"' not in reference] == []  # every public name has an entry
    fetched = re.compile(r"<(?:script|link)[^>]*(?:src|href)=\"?https?://(?!pexgrad)")
    assert not [page for page in tmp_path.rglob("*.html") if fetched.search(page.read_text(encoding="utf-8"))]


def test_examples_that_the_pages_name_exist():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"`(examples/\w+\.py)`", page.read_text(encoding="utf-8"))
    }
    assert named and all((ROOT / name).exists() for name in named)


def parts():
    """Part -> its place in CONTRIBUTING's table, from the top."""
    lines = [
        line.split("|")
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("|")
    ]
    return {name: i for i, line in enumerate(lines[2:]) for name in re.findall(r"`([a-z_]+)/?`", line[1])}


def test_every_part_is_in_the_table():
    package = ROOT / "pexgrad"
    there = {p.stem for p in package.glob("*.py")} | {p.parent.name for p in package.glob("*/__init__.py")}
    assert parts().keys() == there - {"__init__", "__main__", "demo"}


def test_every_module_of_a_part_is_in_the_table():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for part in ("calls", "flat", "definition", "operator", "losses", "stages", "tracing", "inputs", "base"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{part}/`")]
        there = {p.stem for p in (ROOT / "pexgrad" / part).glob("*.py")} - {"__init__"}
        assert set(re.findall(r"`([a-z_]+)`", line.split("|")[3])) == there


def imported(module, path):
    """The modules of the package that one imports when it is imported itself, by their full names."""
    tree = ast.parse(path.read_text())
    typing = {id(n) for t in ast.walk(tree) if isinstance(t, ast.If) for n in ast.walk(t)}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{a.name}" if f"{base}.{a.name}" in sys.modules else base for a in node.names)


def test_imports_run_one_way():
    graph = {n: set(imported(n, path)) - {n} for n, path in sources().items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises where there is a circle
    place = {f"pexgrad.{name}": i for name, i in parts().items()}
    part = {n: ".".join(n.split(".")[:2]) for n in graph}
    wrong = [
        (own, other)
        for own, others in graph.items()
        for other in others
        if part[own] in place and place[part[other]] < place[part[own]]
    ]
    assert not wrong
