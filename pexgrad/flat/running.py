"""A recorded graph made fast to run as it is: without autograd, and into memory that is there already."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from ..base.nodes import returned

aten = torch.ops.aten

# operations that write where they are told to
_WRITING = {aten.mul.Tensor: aten.mul.out, aten.bmm.default: aten.bmm.out}


def without_autograd(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph for runs without autograd: nothing is detached, and fresh tables are filled in place."""
    plain = _copied(module)
    for node in plain.graph.nodes:
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            plain.graph.erase_node(node)
        elif node.target is aten.index_add.default and _is_fresh(node.args[0]):
            node.target = aten.index_add_.default
    plain.recompile()
    return plain


def _is_fresh(table: Any) -> bool:
    """Whether a value is zeros that nothing else uses."""
    return table.target is aten.new_zeros.default and len(table.users) == 1


def writing_rows(module: fx.GraphModule, number: int) -> fx.GraphModule:
    """The same graph with so many further arguments, into which it writes its last results."""
    writing = _copied(module)
    graph = writing.graph
    output, results = graph.output_node(), list(returned(graph))
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for i in range(len(results) - number, len(results)):
        row = results[i]
        with graph.inserting_after(last):
            last = graph.placeholder(f"out_{i}")
        with graph.inserting_before(output):
            results[i] = _written(graph, row, last)
    output.args = (results,)
    graph.eliminate_dead_code()
    writing.recompile()
    return writing


def _written(graph: fx.Graph, row: fx.Node, out: fx.Node) -> fx.Node:
    writing = _WRITING.get(row.target) if len(row.users) == 1 else None  # pyright: ignore[reportArgumentType]
    if writing is not None:
        return graph.call_function(writing, row.args, {"out": out})
    source = row.args[0] if row.target is aten.clone.default else row
    return graph.call_function(aten.copy_.default, (out, source))


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Another graph around the same constants: a loss's weights may be changed in place."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))
