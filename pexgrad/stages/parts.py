"""Cotangents that are a part of another's.

A recurrent layer maps its whole input at once, A = W x (t, b, o), and adds to each step's part the map of the state before:

    y_t = A[t] + a_t        dL/da_t = dL/dy_t = (dL/dA)[t]

where neither term is used anywhere else. Then autograd is not asked for dL/da_t, which would be there once more.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..base.nodes import value

aten = torch.ops.aten


class Part(NamedTuple):
    """A cotangent as a slice of that of another activation."""

    whole: int  # the other's place among the edges
    dim: int
    step: int

    def of(self, cotangent: Tensor | None) -> Tensor | None:
        """The slice."""
        return None if cotangent is None else cotangent.select(self.dim, self.step)


def find_parts(graph: fx.Graph, edges: Mapping[fx.Node, int]) -> dict[int, Part]:
    """Place -> part, for the activations at those places among the edges whose cotangent is a part of another's."""
    if any(n.target is torch._C._set_grad_enabled for n in graph.nodes):
        return {}  # a sum, or what takes an activation apart, may let no gradient through
    found = {i: _part(activation, edges) for activation, i in edges.items()}
    return {i: part for i, part in found.items() if part is not None}


def _part(activation: fx.Node, edges: Mapping[fx.Node, int]) -> Part | None:
    added = _other_term(activation)
    if added is None or added.target is not operator.getitem or len(added.users) != 1:
        return None
    parts, step = _args(added)
    if parts.target is not aten.unbind.int:
        return None
    whole, *dims = _args(parts)
    if whole not in edges or len(whole.users) != 1:
        return None
    same = value(added).shape == value(activation).shape and value(added).dtype == value(activation).dtype
    return Part(edges[whole], dims[0] if dims else 0, step) if same else None


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _other_term(activation: fx.Node) -> fx.Node | None:
    """b, where `activation` is used only in a plain sum a + b."""
    if len(activation.users) != 1:
        return None
    (total,) = activation.users
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    others = [n for n in total.all_input_nodes if n is not activation]
    return others[0] if len(others) == 1 else None
