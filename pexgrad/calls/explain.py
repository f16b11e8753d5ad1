"""What a call will do, as a table: one line for each use of each parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields

from torch import Tensor

from ..base.nodes import operation
from ..inputs.call import Call
from ..operator.component import Term, components
from ..pipeline import Pipeline
from ..stages.evaluate import BoundSite
from ..stages.sites import Operand


@dataclass(frozen=True)
class Line:
    """One use of one parameter by one operation."""

    parameter: str
    operation: str
    module: str
    rule: str
    rows: str  # how rows are computed
    norms: str  # how norms are computed
    bytes: int  # of the parameter's rows
    flags: str
    source: str


@dataclass(frozen=True)
class Explanation:
    """The lines of the table; its `repr` is the table itself."""

    lines: tuple[Line, ...]

    def __repr__(self) -> str:
        header = tuple(f.name for f in fields(Line))
        rows = [header, *([f"{v:,}" if type(v) is int else v for v in astuple(line)] for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


Uses = Sequence[tuple[BoundSite, Operand, Term]]


def explain(pipeline: Pipeline | None, uses: Uses, strategy: str, call: Call) -> Explanation:
    """Describe every use of every parameter, then the parameters that are frozen or unused."""
    size = {k: call.batch * p.numel() * p.element_size() for k, p in call.params.items()}
    if pipeline is None:
        how = "loop" if strategy == "naive" else "aliases"
        lines = [Line(k, "(any)", "", strategy, how, "from rows", size[k], "", "") for k in call.trainable]
    else:
        lines = list(_lines(pipeline, uses, call.params, size))
    missing = size.keys() - {line.parameter for line in lines}
    unused = [k for k in call.trainable if k in missing]
    lines += [Line(k, "(none)", "", "zeros", "", "", size[k], "unused", "") for k in unused]
    lines += [Line(k, "(none)", "", "", "", "", 0, "frozen", "") for k in missing - set(unused)]
    order = {k: i for i, k in enumerate(call.params)}
    return Explanation(tuple(sorted(lines, key=lambda line: order[line.parameter])))


def _lines(pipeline: Pipeline, uses: Uses, params: dict[str, Tensor], size: dict[str, int]) -> Iterator[Line]:
    by_rows = _by_rows(params, [term for _, _, term in uses])
    # one may come to a parameter on several paths
    operands = {id(operand): operand for _, operand, _ in uses}
    times = Counter(k for operand in operands.values() for k in operand.params)
    for bound, operand, term in uses:
        node = bound.site.node
        rule = next(use.rule for use in bound.uses if use.operand is operand)
        derived = pipeline.windows[operand.node] is None
        for k in term.params:
            flags = {
                "fallback": rule is None,
                "derived": derived,
                "view": not derived and term.window is not None and not term.window.whole,
                "tied": times[k] > 1,
            }
            yield Line(
                parameter=k,
                operation=f"{operation(node)}.{operand.name}",
                module=str(node.meta.get("path", "")),
                rule="fallback" if rule is None else rule.name,
                rows=term.factor.algorithm(),
                norms="rows in pieces" if k in by_rows else term.factor.norm_algorithm(),
                bytes=size[k],
                flags=" ".join(flag for flag, on in flags.items() if on),
                source=str(node.meta.get("source", "")),
            )


def _by_rows(params: dict[str, Tensor], terms: list[Term]) -> set[str]:
    """Parameters whose norms take rows, whatever the factors could do: computed from others, or used in parts that overlap."""
    return {k for c in components(params, terms, False) if c.windows() is None for k in c.leaves}
