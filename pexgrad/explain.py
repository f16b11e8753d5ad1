"""What a call will do, as a table: one line for each use of each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from torch import Tensor

from .flow import operation
from .pipeline import Pipeline
from .plan import Use
from .sites import Operand, Site


@dataclass(frozen=True)
class Line:
    """One use of one parameter by one operation."""

    parameter: str
    operation: str
    module: str
    rule: str
    algorithm: str
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


def explain(
    pipeline: Pipeline | None, strategy: str, params: dict[str, Tensor], trainable: Iterable[str], batch: int, conv_rule: str
) -> Explanation:
    """Describe every use of every parameter, then the parameters that are frozen or unused."""
    names = list(trainable)
    lines: list[Line] = []
    size = {k: batch * p.numel() * p.element_size() for k, p in params.items()}
    if pipeline is None:
        lines = [Line(k, "(any)", "", strategy, "loop" if strategy == "naive" else "aliases", size[k], "", "") for k in names]
    else:
        for bound in pipeline.sites:
            for use in bound.uses:
                lines += [_line(pipeline, bound.site, use, k, size[k], conv_rule) for k in use.operand.params]
        used = {line.parameter for line in lines}
        lines += [Line(k, "(none)", "", "zeros", "", size[k], "unused", "") for k in names if k not in used]
    lines += [Line(k, "(none)", "", "", "", 0, "frozen", "") for k in params if k not in names]
    order = {k: i for i, k in enumerate(params)}
    return Explanation(tuple(sorted(lines, key=lambda line: order[line.parameter])))


def _line(pipeline: Pipeline, site: Site, use: Use, parameter: str, size: int, conv_rule: str) -> Line:
    node = site.node
    is_conv = use.rule is not None and "conv_rule" in use.rule.statics
    return Line(
        parameter=parameter,
        operation=f"{operation(node)}.{use.operand.name}",
        module=str(node.meta.get("path", "")),
        rule="fallback" if use.rule is None else use.rule.name,
        algorithm="replay for each example" if use.rule is None else (conv_rule if is_conv else ""),
        bytes=size,
        flags=" ".join(_flags(pipeline, use.operand, use, parameter)),
        source=str(node.meta.get("source", "")),
    )


def _flags(pipeline: Pipeline, operand: Operand, use: Use, parameter: str) -> Iterable[str]:
    if use.rule is None:
        yield "fallback"
    window = pipeline.windows[operand.node]
    if window is None:
        yield "derived"  # computed from the parameter: rows are pulled back one example at a time
    elif not window.whole:
        yield "view"
    uses = [u for s in pipeline.sites for u in s.uses if parameter in u.operand.params]
    if len(uses) > 1:
        yield "tied"


def _text(v: object) -> str:
    return f"{v:,}" if isinstance(v, int) else str(v)
