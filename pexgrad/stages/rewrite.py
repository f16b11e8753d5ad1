"""Stage 2: the traced graph in a form that the later stages can read, and that changes nobody's tensors.

- A parameter that the code reached by a way of its own (a closure) becomes its placeholder.
- Parameters, buffers, inputs and constants that the model writes to are cloned first.
- A parameter in an elementwise operation is expanded over the batch, so that autograd itself gives the
  gradient of each example's copy: one rule for every elementwise operation there is.
- Any other in-place operation with a parameter becomes the functional one and a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ..base.nodes import (
    batch_dims,
    by_name,
    eliminate_dead_code,
    is_differentiable,
    is_of_batch,
    mutated_operands,
    operation,
    returned,
    storage,
    use_instead,
    value,
    where,
    written_memory,
)
from ..inputs.call import Call
from ..tracing.outputs import FROM_GRAPH, Untraced
from ..tracing.trace import Trace
from .flow import Flow, State, analyse

aten = torch.ops.aten


def rewrite(trace: Trace, call: Call) -> list[bool]:
    """Rewrite `trace.graph` in place; says of each of its outputs whether it has become a copy for each example."""
    eliminate_dead_code(trace.graph)
    _adopt_parameters(trace, call)
    _protect(trace)
    flow = _settle_hidden_writes(trace, set(call.trainable))
    for node in list(trace.graph.nodes):
        if parameter_operands(node, flow) and not _expand_operands(node, flow, trace):
            _make_functional(node, trace)
    copied = _settle_outputs(trace, flow)
    trace.graph.lint()
    return copied


def parameter_operands(node: fx.Node, flow: Flow) -> list[fx.Node]:
    """The parameter-only operands with a gradient of a batched operation: what makes a node a site."""
    if node.op != "call_function" or not flow.grad_enabled[node] or not flow.batched(node):
        return []
    if not is_differentiable(value(node)):
        return []
    return [
        n
        for n, s in flow.operands[node].items()
        if s.params and not s.from_input and not is_of_batch(value(n), flow.batch)
    ]


def _adopt_parameters(trace: Trace, call: Call) -> None:
    """Replace a parameter or buffer that the code reached past its arguments, through a global say, by the call's own."""
    own = call.module
    # parameters, buffers, inputs
    placeholders = [n for n in trace.graph.nodes if n.op == "placeholder"]
    nodes = trace.params | dict(zip(own.buffers, placeholders[len(trace.params) :], strict=False))
    places = {id(t): nodes[k] for held in (call.params, own.parameters, own.buffers) for k, t in held.items()}
    for node in list(trace.graph.nodes):
        if node.op == "get_attr" and (place := places.get(id(getattr(trace.root, node.target, None)))):
            node.replace_all_uses_with(place)
            trace.graph.erase_node(node)


def _protect(trace: Trace) -> None:
    """Clone what belongs to the caller before the graph writes to it."""
    written = set().union(*map(written_memory, trace.graph.nodes))
    first = next(n for n in trace.graph.nodes if n.op != "placeholder")
    for node in list(trace.graph.nodes):
        if node.op in ("placeholder", "get_attr") and node.users and storage(node) in written:
            with trace.graph.inserting_before(first if node.op == "placeholder" else node.next):
                clone = insert(trace, aten.clone.default, (node,), like=node)
            use_instead(clone, node)


def _settle_hidden_writes(trace: Trace, trainable: set[str]) -> Flow:
    """Let what uses a parameter behind a write with gradients off use it itself: for autograd it is the same value as before."""
    flow = analyse(trace, trainable)
    hidden = [n for n in trace.graph.nodes if not flow.grad_enabled[n] and _gives_back_what_it_writes_to(n)]
    for node in hidden:
        (target,) = mutated_operands(node)
        if flow.operands[node][target].params:
            node.replace_all_uses_with(target)
    return analyse(trace, trainable) if hidden else flow


def _gives_back_what_it_writes_to(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or len(node.target._schema.returns) != 1:
        return False
    alias = node.target._schema.returns[0].alias_info
    return alias is not None and alias.is_write


def _settle_outputs(trace: Trace, flow: Flow) -> list[bool]:
    """Expand outputs of parameters alone over the batch, so that gradients can be told apart; take away mixed ones."""
    output = trace.graph.output_node()
    kept, copied = [], []
    slots = [i for i, leaf in enumerate(trace.output_leaves) if leaf is FROM_GRAPH]
    for slot, node in zip(slots, returned(trace.graph), strict=True):
        by_example = not isinstance(value(node), Tensor) or bool(batch_dims(value(node), flow.batch))
        state = State() if by_example else flow.states.get(node, State())
        if state.from_input:
            trace.output_leaves[slot] = Untraced(
                f"value without a batch dimension that depends on the whole batch ({where(node)})"
            )
            continue
        kept.append(_copied(node, trace, output) if state.params else node)
        copied.append(bool(state.params))
    output.args = (kept,)
    return copied


def _copied(node: fx.Node, trace: Trace, output: fx.Node) -> fx.Node:
    with trace.graph.inserting_before(output):
        size = insert(trace, aten.sym_size.int, (trace.inputs[0], 0), like=node)
        return insert(trace, aten.expand.default, (node, [size, *value(node).shape]), like=node)


def insert(
    trace: Trace, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """A new node at the graph's insertion point, with its fake value, placed in the source where `like` is."""
    node = trace.graph.call_function(target, args, kwargs)
    node.meta.update({k: like.meta[k] for k in ("source", "path") if k in like.meta})
    with trace.fake_mode, enable_python_dispatcher(), torch.enable_grad():
        node.meta["val"] = target(*map_arg(args, value_or_constant(trace)), **kwargs)
    return node


def value_or_constant(trace: Trace) -> Callable[[fx.Node], Any]:
    """The fake value of a node; the constant itself for one that has none."""

    def get(node: fx.Node) -> Any:
        return getattr(trace.root, str(node.target)) if node.op == "get_attr" else value(node)

    return get


def _expand_operands(node: fx.Node, flow: Flow, trace: Trace) -> bool:
    """Give an elementwise operation its parameters expanded over the batch; False where that is not possible."""
    out = value(node)
    broadcast = _broadcast_operands(node, flow)
    if not broadcast or not isinstance(out, Tensor):
        return False
    dims = batch_dims(out, flow.batch)
    reference = _reference(node, dims, flow)
    if reference is None:
        return False
    new = {p: _expanded(p, node, dims[0], reference, trace) for p in broadcast}
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
    if not _accepts(node, args, kwargs, trace):
        for n in new.values():
            trace.graph.erase_node(n)
        return False
    node.args, node.kwargs = args, kwargs
    return True


# operands that broadcast against the output's leading dimensions, in operations that are not elementwise
_BROADCAST = {
    aten.scaled_dot_product_attention.default: "attn_mask",
    aten.addmm.default: "self",
    aten.baddbmm.default: "self",
    aten.addmv.default: "self",
}


def _broadcast_operands(node: fx.Node, flow: Flow) -> list[fx.Node]:
    """The parameter-only operands of `node` that it broadcasts against the batch."""
    target, operands = node.target, parameter_operands(node, flow)
    if not isinstance(target, OpOverload):
        return []
    if torch.Tag.pointwise in target.tags or target is aten.copy_.default:
        return operands
    if target not in _BROADCAST:
        return []
    named = by_name(target, node.args, node.kwargs)
    broadcast = named[_BROADCAST[target]]
    used_once = sum(a is broadcast for a in named.values()) == 1
    return [n for n in operands if n is broadcast and used_once]


def _reference(node: fx.Node, dims: tuple[int, ...], flow: Flow) -> tuple[fx.Node, int] | None:
    """An operand, and its dimension, from which the size of the output's batch dimension can be read."""
    if len(dims) != 1:
        return None
    from_right = dims[0] - value(node).dim()
    for n in node.all_input_nodes:
        val = value(n)
        if isinstance(val, Tensor) and batch_dims(val, flow.batch) == (from_right + val.dim(),):
            return n, from_right + val.dim()
    return None


def _expanded(p: fx.Node, node: fx.Node, dim: int, reference: tuple[fx.Node, int], trace: Trace) -> fx.Node:
    out, val = value(node), value(p)
    missing = out.dim() - val.dim()
    with trace.graph.inserting_before(node):
        # a tensor without dimensions does not promote the others
        if val.dim() == 0 and val.dtype != out.dtype:
            p = insert(trace, aten._to_copy.default, (p,), like=node, dtype=out.dtype)
        size = insert(trace, aten.sym_size.int, reference, like=node)
        sizes: Iterable[Any] = [1] * missing + list(val.shape)
        sizes = [size if i == dim else n for i, n in enumerate(sizes)]
        return insert(trace, aten.expand.default, (p, sizes), like=node)


def _accepts(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace) -> bool:
    """Whether the operation takes these operands and gives a value of the same shape and dtype."""
    get = value_or_constant(trace)
    try:
        with trace.fake_mode, enable_python_dispatcher(), torch.no_grad():
            # an in-place operation must not change the fakes that the graph remembers
            fakes = map_arg((args, kwargs), lambda n: _copy(get(n)))
            out = node.target(*fakes[0], **fakes[1])  # pyright: ignore[reportCallIssue]
    except Exception:  # noqa: BLE001 - whatever it says, the operation does not take them
        return False
    return out.shape == value(node).shape and out.dtype == value(node).dtype


def _copy(val: Any) -> Any:
    return val.clone() if isinstance(val, Tensor) else val


def _make_functional(node: fx.Node, trace: Trace) -> None:
    """Rewrite `x.op_(p)` as `x.copy_(op(x, p))`, so that the site's output is a value of its own."""
    targets = list(mutated_operands(node))
    functional = _functional(node)
    if len(targets) != 1 or functional is None:
        return
    with trace.graph.inserting_before(node):
        new = insert(trace, functional, node.args, like=node, **node.kwargs)
        copy = trace.graph.call_function(aten.copy_.default, (targets[0], new))
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy)
    trace.graph.erase_node(node)


def _functional(node: fx.Node) -> OpOverload | None:
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    name = operation(node)
    packet = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if name.endswith("_") else None
