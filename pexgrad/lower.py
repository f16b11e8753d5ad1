"""A transform of one input signature as one flat graph: forward, cotangents and rules, with no autograd inside.

The eager call runs once on fake tensors while `make_fx` writes down every ATen operation, those of the backward
included. What then stands in the way of running the graph elsewhere is replaced:

- operations in place, by a second pass under functionalisation;
- `detach` and `alias`, which mean nothing without autograd;
- `view` by `reshape` and `sym_size` by `Tensor.size`, which `torch.func.vmap` also takes for strided and wrapped tensors.

The batch size stays symbolic where the model's loss and rules work on the whole batch at once. Where something loops over
examples (a loss written for one example, the fallback for an operation without a rule), the graph is for one batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from . import trees
from .arguments import Call, Options
from .errors import TraceError, VerificationError
from .flow import operation
from .jacobian import Jacobian
from .pipeline import Pipeline
from .still import StandStill
from .trace import _METADATA, HINT, _fake, _fake_batch, _lock
from .verify import _worst as largest_error

aten = torch.ops.aten

Answer = Callable[[Jacobian], Any]  # what a transform returns, from the Jacobian of the whole batch


@dataclass(frozen=True, eq=False)
class Lowered:
    """The flat graph: parameters, buffers, input tensors and target tensors in, the result's tensors out."""

    module: fx.GraphModule
    spec: pytree.TreeSpec  # of the result
    guards: tuple[sympy.Basic, ...]
    batch: sympy.Symbol | int

    def serves(self, batch: int) -> bool:
        """Whether the graph is right for this batch size."""
        if isinstance(self.batch, int):
            return batch == self.batch
        return all(bool(g.subs(self.batch, batch)) for g in self.guards)

    def run(self, values: Sequence[Tensor]) -> Any:
        """The result for these values."""
        return pytree.tree_unflatten(self.module(*values), self.spec)


def lower(
    pipeline: Pipeline, call: Call, buffers: Sequence[Tensor], options: Options, answer: Answer
) -> Lowered:
    """The graph of a call, for every batch size if that is possible and for this one if not."""
    if options.create_graph:
        _refuse_stop_gradients(pipeline)
    try:
        lowered = _record(pipeline, call, buffers, options, answer, symbolic=True)
    except TraceError:  # some operations' shape functions take no symbolic size
        lowered = None
    if lowered is None or not lowered.serves(call.batch):
        lowered = _record(pipeline, call, buffers, options, answer, symbolic=False)
    if options.verify:
        _verify(lowered, pipeline, call, buffers, options, answer)
    return lowered


def _verify(
    lowered: Lowered,
    pipeline: Pipeline,
    call: Call,
    buffers: Sequence[Tensor],
    options: Options,
    answer: Answer,
) -> None:
    """Raise where the graph and the call itself give different results."""
    params = {k: p.detach().requires_grad_(k in call.trainable) for k, p in call.params.items()}
    with StandStill():
        want = answer(pipeline.jacobian(params, buffers, call.trainable, call.x, call.y, call.batch, options))
        got = lowered.run(flat_values(call.params, buffers, call.x, call.y))
    worst = largest_error(
        *({str(i): t.detach() for i, t in enumerate(pytree.tree_leaves(tree))} for tree in (got, want))
    )
    if worst is not None:
        raise VerificationError(
            f"the flat graph of this call differs from the call itself by a relative error of {worst[1]:.1e}; "
            "call the function itself"
        )


def flat_values(params: dict[str, Tensor], buffers: Sequence[Tensor], x: Any, y: Any) -> list[Tensor]:
    """The values that a flat graph takes, in its order."""
    return [*params.values(), *buffers, *trees.tensors(trees.as_call(x)), *trees.tensors(y)]


def _record(
    pipeline: Pipeline,
    call: Call,
    buffers: Sequence[Tensor],
    options: Options,
    answer: Answer,
    *,
    symbolic: bool,
) -> Lowered:
    env = ShapeEnv(duck_shape=True, specialize_zero_one=False)
    mode = _Fakes(shape_env=env, allow_non_fake_inputs=True)
    examples = [*trees.tensors(trees.as_call(call.x)), *trees.tensors(call.y)]
    fakes = [
        *(_fake(mode, p).requires_grad_(k in call.trainable) for k, p in call.params.items()),
        *(_fake(mode, b) for b in buffers),
        *(_fake_batch(mode, t, HINT) if symbolic else _fake(mode, t) for t in examples),
    ]
    batch = fakes[-len(examples)].shape[0]
    symbol = batch.node.expr if symbolic else None  # read before anything may fix it  # pyright: ignore[reportAttributeAccessIssue]
    found: dict[str, Any] = {}

    def run(*flat: Tensor) -> list[Tensor]:
        params, own_buffers, x, y = _unflat(flat, call, len(buffers))
        jacobian = pipeline.jacobian(params, own_buffers, call.trainable, x, y, batch, _batchwise(options))
        leaves, found["spec"] = pytree.tree_flatten(answer(jacobian))
        return leaves

    module = _make_graph(run, fakes)
    if any(map(_writes, module.graph.nodes)):
        module = _make_graph(dispatch_functionalize(module, FunctionalTensorMode()), fakes)
    _make_portable(module, differentiable=options.create_graph)
    if symbol is None:
        return Lowered(module, found["spec"], (), int(batch))
    return Lowered(module, found["spec"], tuple(_guards(env, symbol)), symbol)


def _guards(env: ShapeEnv, batch: sympy.Symbol) -> Iterator[sympy.Basic]:
    """What the recording took for granted about the batch size, except to compute metadata."""
    for guard in env.guards:
        filename = getattr(guard.sloc.framework_loc, "filename", str(guard.sloc.framework_loc))
        if not any(part in filename for part in _METADATA):
            yield guard.expr
    if batch in env.replacements:
        yield sympy.Eq(batch, env.replacements[batch])


class _Fakes(FakeTensorMode):
    """Fake tensors whose padding keeps a symbolic batch size: torch's own fixes it."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.cache_enabled = (
            False  # a cache of shapes takes longer than it saves in a graph that is recorded once
        )

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.constant_pad_nd.default:
            x, padding = args[0], args[1]
            return x.new_empty(_padded(x.shape, padding))
        return super().dispatch(func, types, args, kwargs)


def _padded(shape: Sequence[Any], padding: Sequence[int]) -> list[Any]:
    pairs = list(zip(padding[::2], padding[1::2], strict=True))  # (before, after), the last dimension first
    grown = [n + sum(pairs[i]) if i < len(pairs) else n for i, n in enumerate(reversed(shape))]
    return grown[::-1]


def _batchwise(options: Options) -> Options:
    """The options with a convolution rule that works on the whole batch at once."""
    return replace(options, conv_rule="unfold") if options.conv_rule in ("auto", "loop") else options


def _unflat(
    flat: Sequence[Tensor], call: Call, n_buffers: int
) -> tuple[dict[str, Tensor], list[Tensor], Any, Any]:
    left = iter(flat)
    params = {k: next(left) for k in call.params}
    buffers = [next(left) for _ in range(n_buffers)]
    # positional and keyword arguments as one tuple: the pipeline reads no more than its tensors
    x, y = (trees.map_tensors(lambda _: next(left), tree) for tree in (trees.as_call(call.x), call.y))
    return params, buffers, x, y


def _make_graph(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    try:
        # fused attention has no rule for vmap and no second derivative; its parts have both
        with _lock, sdpa_kernel(SDPBackend.MATH):
            module = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    except Exception as e:
        lines = str(e).strip().splitlines()
        raise TraceError(
            f"this call cannot be lowered to one flat graph: {type(e).__name__}: {lines[0] if lines else ''}; "
            "call the function itself"
        ) from e
    module.graph.eliminate_dead_code()
    return module


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _make_portable(module: fx.GraphModule, *, differentiable: bool) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        same = _same_as(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif node.target in _PORTABLE:
            node.target = _PORTABLE[node.target]
        elif node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
    if not differentiable:
        _cut_gradients(graph)
    graph.lint()
    module.recompile()


_PORTABLE = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
_METHODS = {aten.sym_size.int: "size", aten.sym_numel.default: "numel"}

# position, among the arguments of a slice and its relatives, of the dimension, which (start, end, step) follow
_SLICES = {aten.slice.Tensor: 1, aten.slice_scatter.default: 2, aten.slice_backward.default: 2}
_TO_THE_END = torch.iinfo(torch.int64).max


def _same_as(node: fx.Node) -> Any:
    """An operand that is all that the node gives; None where the node does something."""
    if node.target in (aten.detach.default, aten.alias.default):
        return node.args[0]
    if node.target is aten.copy.default:  # the functional `copy(destination, source)`
        source = node.args[1]
        before, after = (n.meta["val"] for n in (source, node))  # type: ignore[union-attr]
        alike = (
            before.dtype == after.dtype
            and before.device == after.device
            and list(before.shape) == list(after.shape)
        )
        return source if alike else None
    at = _SLICES.get(node.target)  # type: ignore[arg-type]
    if at is None:
        return None
    _, start, end, step = (*node.args[at:], *(0, 0, _TO_THE_END, 1)[len(node.args) - at :])
    whole = start in (0, None) and end in (None, _TO_THE_END) and step == 1
    if not whole:
        # no number that large passes through vmap
        node.args = tuple(
            _end_of(node) if i == at + 2 and a == _TO_THE_END else a for i, a in enumerate(node.args)
        )
        return None
    return node.args[1 if node.target is aten.slice_scatter.default else 0]


def _end_of(node: fx.Node) -> Any:
    sizes, dim = (node.args[1], node.args[2]) if node.target is aten.slice_backward.default else (None, 0)
    return None if sizes is None else sizes[dim]  # type: ignore[index]


def _cut_gradients(graph: fx.Graph) -> None:
    """Let no gradient pass, so that without `create_graph` the result is a constant, as the function's is."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node in inputs:
        if not node.meta["val"].is_floating_point() and not node.meta["val"].is_complex():
            continue
        with graph.inserting_after(inputs[-1]):
            cut = graph.call_function(aten.detach.default, (node,))
        cut.meta.update(node.meta)
        node.replace_all_uses_with(cut, delete_user_cb=lambda user, cut=cut: user is not cut)


def _refuse_stop_gradients(pipeline: Pipeline) -> None:
    for node in pipeline.program.module.graph.nodes:
        if node.target in (aten.detach.default, torch._C._set_grad_enabled) or not _is_plain(node):
            raise TraceError(
                f"the model stops or changes gradients ({operation(node)} at {node.meta.get('source', '')}), which a flat "
                "graph keeps for the rows but not for derivatives of the rows; leave create_graph off, or differentiate the "
                "function itself with torch.autograd.grad"
            )


def _is_plain(node: fx.Node) -> bool:
    """Whether autograd's own derivative of the operation is what the graph will have."""
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return True
    return getattr(node.target, "__module__", "") in ("_operator", "torch", "math", "pexgrad.tap", "torch._C")


# --- the same graph with the function's own arguments -------------------------------------------------


def with_arguments(
    lowered: Lowered,
    call: Call,
    given: tuple[Any, Any, Any],
    buffers: dict[str, Tensor],
    whole: Callable[[Any], Any],
) -> fx.GraphModule:
    """The graph as a module called like the function: `module(params, x, y)`; `given` are examples of those three.

    `whole` gives the result its last shape.

    Parameters that were not given, and buffers, become buffers of the module: the same tensors as the model's own.
    """
    leaves, spec = pytree.tree_flatten((given, {}))
    names = [
        _name(path, own)
        for own, tree in zip(("params", "x", "y"), given, strict=True)
        for path, _ in pytree.tree_flatten_with_path(tree)[0]
    ]
    args = [n for n in lowered.module.graph.nodes if n.op == "placeholder"]
    n_examples = len(trees.tensors(trees.as_call(call.x))) + len(trees.tensors(call.y))
    n_given = sum(isinstance(v, Tensor) for v in leaves) - n_examples
    own = {k: call.params[k].detach() for k in list(call.params)[n_given:]} | buffers
    if n_given < 0 or len(args) != n_given + len(own) + n_examples:
        raise TraceError(
            "this call cannot be lowered: its inputs are of classes that torch's pytree does not take apart; pass them as "
            "tensors, tuples, lists and dicts, or register the class with torch.export.register_dataclass"
        )
    root, graph = _root(lowered.module, own), fx.Graph()
    bound = args[:n_given] + args[n_given + len(own) :]
    new = _placeholders(graph, leaves, names, bound)
    for node, k in zip(args[n_given:], own, strict=False):
        new[node] = graph.get_attr(_safe(k))
        new[node].meta.update(node.meta)
    tree = whole(pytree.tree_unflatten(list(graph.graph_copy(lowered.module.graph, new)), lowered.spec))  # pyright: ignore[reportArgumentType]
    result, result_spec = pytree.tree_flatten(tree)
    _name_results(tree)
    graph.output(result)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["params", "x", "y"], spec, result_spec)))
    graph.lint()
    return fx.GraphModule(root, graph, "Lowered")


def _placeholders(
    graph: fx.Graph, leaves: list[Any], names: list[str], bound: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """One for each leaf, those that are no tensors included; old node -> new node."""
    left, new = iter(bound), {}
    for leaf, name in zip(leaves, names, strict=True):
        node = graph.placeholder(name)
        if isinstance(leaf, Tensor):
            old = next(left)
            node.meta.update(old.meta)
            new[old] = node
    return new


def _root(module: fx.GraphModule, own: dict[str, Tensor]) -> torch.nn.Module:
    """What the graph's attributes are read from: the constants of the flat one, and the model's own tensors."""
    root = torch.nn.Module()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            root.register_buffer(node.target, getattr(module, node.target))
    for k, t in own.items():
        root.register_buffer(_safe(k), t)
    return root


def _name_results(tree: Any) -> None:
    """Name the nodes of the result by their place in it."""
    for path, node in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(node, fx.Node) and node.op == "call_function":
            node._rename(_name(path, "result"))


def _name(path: Sequence[Any], *before: str) -> str:
    """A place in a tree as a name."""
    return _safe("_".join([*before, *map(_word, path)]))


def _word(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
