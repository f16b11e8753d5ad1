"""What a call will do, as a table: one line for each use of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
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
        rows = [header, *(tuple(_text(v) for v in astuple(line)) for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


Uses = Sequence[tuple[BoundSite, Operand, Term]]


def explain(pipeline: Pipeline | None, uses: Uses, strategy: str, call: Call) -> Explanation:
    """Describe every use of every parameter, then the parameters that are frozen or unused."""
    params, trainable = call.params, call.trainable
    size = {k: call.batch * params[k].numel() * params[k].element_size() for k in params}
    if pipeline is None:
        how = "loop" if strategy == "naive" else "aliases"
        lines = [Line(k, "(any)", "", strategy, how, "from rows", size[k], "", "") for k in trainable]
    else:
        by_rows = _by_rows(params, [term for _, _, term in uses])
        lines = [
            _line(
                site,
                operand,
                term,
                k,
                size[k],
                k in by_rows,
                derived=pipeline.windows[operand.node] is None,
                tied=_tied(uses, k),
            )
            for site, operand, term in uses
            for k in term.params
        ]
        used = {line.parameter for line in lines}
        lines += [
            Line(k, "(none)", "", "zeros", "", "", size[k], "unused", "") for k in trainable if k not in used
        ]
    lines += [Line(k, "(none)", "", "", "", "", 0, "frozen", "") for k in params if k not in trainable]
    order = {k: i for i, k in enumerate(params)}
    return Explanation(tuple(sorted(lines, key=lambda line: order[line.parameter])))


def _tied(uses: Uses, parameter: str) -> bool:
    # one use may come to a parameter on several paths
    return len({id(operand) for _, operand, _ in uses if parameter in operand.params}) > 1


def _by_rows(params: dict[str, Tensor], terms: list[Term]) -> set[str]:
    """Parameters whose norms take rows, whatever the factors could do: computed from others, or used in parts that overlap."""
    return {k for c in components(params, terms, False) if c.windows() is None for k in c.leaves}


def _line(
    bound: BoundSite,
    operand: Operand,
    term: Term,
    parameter: str,
    size: int,
    by_rows: bool,
    *,
    derived: bool,
    tied: bool,
) -> Line:
    node = bound.site.node
    rule = next(use.rule for use in bound.uses if use.operand is operand)
    flags = {
        "fallback": rule is None,
        "derived": derived,
        "view": not derived and term.window is not None and not term.window.whole,
        "tied": tied,
    }
    return Line(
        parameter=parameter,
        operation=f"{operation(node)}.{operand.name}",
        module=str(node.meta.get("path", "")),
        rule="fallback" if rule is None else rule.name,
        rows=term.factor.algorithm(),
        norms="rows in pieces" if by_rows else term.factor.norm_algorithm(),
        bytes=size,
        flags=" ".join(k for k, on in flags.items() if on),
        source=str(node.meta.get("source", "")),
    )


def _text(v: object) -> str:
    return f"{v:,}" if isinstance(v, int) else str(v)
