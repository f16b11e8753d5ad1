"""A transform's results for all members of an ensemble, from one run of its flat graph."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..base import modes, nested, trees
from ..errors import InputError, TraceError
from ..flat.lowered import Lowered
from ..flat.stacked import is_random, run_stacked
from ..flat.stacking import Stacked
from ..inputs.arguments import Options, check_call
from ..inputs.call import Call
from .transform import Transform


def run_members(
    fn: Transform,
    params: Mapping[str, Any],
    x: Any,
    y: Any,
    members: int,
    stacked_data: bool,
    most: int | None,
) -> Any:
    """The results, with the members on dimension 0, as they are in `params` and, where it is stacked, in the data.

    None, with `most`, where the call has no such graph, has options, or a member's rows take more than that many bytes.
    """
    if nested.is_nested(params):
        flat, named, whole = fn._by_name(params)
        found = run_members(flat, named, x, y, members, stacked_data, most)
        return None if found is None else whole(found)
    with modes.outside_transforms(), modes.recording():
        params, x, y = map(modes.recordable, (dict(params), x, y))
        one = (trees.map_tensors(lambda t: t[0], tree) if stacked_data else tree for tree in (x, y))
        call = check_call(fn._model, {k: p[0] for k, p in params.items()}, *one)
        lowered = _graph(fn, call) if most is None else _graph_or_none(fn, call, most)
    if lowered is None:
        return None
    own = [Stacked(params[k].detach()) if k in params else p.detach() for k, p in call.params.items()]
    data = [*trees.tensors(trees.as_call(x)), *trees.tensors(y)]
    values = [*own, *call.buffers, *(map(Stacked, data) if stacked_data else data)]
    with torch.no_grad(), modes.without_autocast(call.params[next(iter(params))].device.type):
        flat = run_stacked(lowered.module, values, members)
    return pytree.tree_unflatten(flat, lowered.spec)


def _graph_or_none(fn: Transform, call: Call, most: int) -> Lowered | None:
    if fn._options == Options(verify=fn._options.verify) and call.bytes_of_rows() <= most:
        with contextlib.suppress(InputError, TraceError):
            return _graph(fn, call)
    return None


def _graph(fn: Transform, call: Call) -> Lowered:
    if fn._options.create_graph:
        raise InputError('members run together without autograd: with create_graph use how="one by one"')
    lowered = fn._graph(call)
    if is_random(lowered.module):
        raise TraceError("each member draws random numbers of its own, so members cannot run together")
    return lowered
