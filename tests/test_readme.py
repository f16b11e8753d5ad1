"""Every fenced `python` block of the pages runs: page by page, top to bottom, each page in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pexgrad.__main__ import DEMO_EXTRA

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IMPORT = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets(page):
    text = page.read_text(encoding="utf-8")
    for library in DEMO_EXTRA.intersection(IMPORT.findall(text)):
        pytest.importorskip(library)
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        source = "\n" * line + block[1]  # so that a traceback names the page's own line
        exec(compile(source, str(page), "exec", dont_inherit=True), namespace)
