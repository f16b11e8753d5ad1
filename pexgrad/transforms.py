"""The public transforms: from a model to a pure function of its parameters."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import trees
from .errors import InputError
from .explain import Explanation, explain
from .factors.conv import check_conv_rule
from .jacobian import Jacobian
from .loss import ExampleLosses, Loss
from .pipeline import Pipeline, build
from .rebind import Bound, fingerprint, refuse_backward_hooks
from .strategies import LOOPS, STRATEGIES
from .verify import verify

Model = nn.Module | Callable[..., Any]
Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Options:
    """How rows are computed; the same for every transform."""

    strategy: str = "crb"
    chunk_size: int | None = None
    create_graph: bool = False
    verify: bool = True
    conv_rule: str = "auto"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"strategy={self.strategy!r} is not one of {', '.join(map(repr, STRATEGIES))}")
        if self.chunk_size is not None and (not isinstance(self.chunk_size, int) or self.chunk_size < 1):
            raise InputError(f"chunk_size={self.chunk_size!r} must be a positive number of examples, or None")
        check_conv_rule(self.conv_rule)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, checked."""

    params: dict[str, Tensor]  # every parameter of the model: the given ones in their order, then the model's own
    trainable: list[str]  # the entries to differentiate, in the order given
    x: Any
    y: Any
    batch: int


class Transform:
    """What all transforms share: checked arguments, one trace for each input signature, and the Jacobian."""

    def __init__(self, model: Model, loss: Loss, options: Options):
        if not callable(model):
            raise InputError(f"model must be an nn.Module or a function f(params, *inputs), not {type(model).__name__}")
        self._model, self._loss, self._options = Bound(model), ExampleLosses(loss), options
        self._pipelines: dict[Any, list[Pipeline]] = {}
        self._lock = threading.RLock()

    @property
    def trace_count(self) -> int:
        """How many times the model has been traced so far."""
        return sum(map(len, self._pipelines.values()))

    def explain(self, params: Params, x: Any, y: Any = None) -> Explanation:
        """The table of what a call with these arguments does; nothing is differentiated."""
        call = self._check(params, x, y)
        pipeline = self._pipeline(call) if self._options.strategy == "crb" and call.batch else None
        o = self._options
        return explain(pipeline, o.strategy, call.params, call.trainable, call.batch, o.conv_rule)

    def _jacobian(self, call: Call) -> Jacobian:
        o = self._options
        params = {k: self._leaf(p, k in call.trainable) for k, p in call.params.items()}
        if o.strategy != "crb":
            run = LOOPS[o.strategy]
            return run(self._model, self._loss, params, call.trainable, call.x, call.y, call.batch, o.create_graph)
        pipeline = self._pipeline(call)
        return pipeline.jacobian(
            params, call.trainable, list(self._model.buffers().values()), call.x, call.y, call.batch,
            conv_rule=o.conv_rule, create_graph=o.create_graph,
        )  # fmt: skip

    def _leaf(self, p: Tensor, trainable: bool) -> Tensor:
        if self._options.create_graph and p.requires_grad:
            return p
        return p.detach().requires_grad_(trainable)

    def _chunks(self, call: Call) -> list[Call]:
        size = self._options.chunk_size or call.batch
        return [
            Call(call.params, call.trainable, trees.examples(call.x, b, b + size), trees.examples(call.y, b, b + size),
                 min(size, call.batch - b))
            for b in range(0, call.batch, size)
        ]  # fmt: skip

    # --- traces -------------------------------------------------------------------------------------

    def _pipeline(self, call: Call) -> Pipeline:
        key = self._signature(call)
        with self._lock:
            known = self._pipelines.setdefault(key, [])
            for pipeline in known:
                if pipeline.trace.serves(call.batch):
                    return pipeline
            refuse_backward_hooks(self._model.model)
            trainable = set(call.trainable)
            pipeline, sample = build(self._model, self._loss, call.params, trainable, call.x, call.y, call.batch)
            if self._options.verify:
                verify(pipeline, self._model, self._loss, call.params, call.trainable, sample)
            known.append(pipeline)
            return pipeline

    def _signature(self, call: Call) -> Any:
        def describe(v: Any) -> Any:
            if isinstance(v, Tensor):
                return v.shape[1:], v.dtype, v.device, v.stride()[1:]
            return v if isinstance(v, bool | int | float | str | None) else id(v)

        leaves, spec = trees.flatten(trees.as_call(call.x))
        y_leaves, y_spec = trees.flatten(call.y)
        return (
            fingerprint(self._model.model),
            tuple((k, p.shape, p.dtype, p.device, p.stride()) for k, p in call.params.items()),
            tuple(call.trainable),
            spec, tuple(map(describe, leaves)), y_spec, tuple(map(describe, y_leaves)),
            torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"),
        )  # fmt: skip

    # --- arguments ----------------------------------------------------------------------------------

    def _check(self, params: Params, x: Any, y: Any) -> Call:
        if not isinstance(params, Mapping):
            raise InputError(f"params must be a dict of tensors by name, not {type(params).__name__}")
        if not params:
            raise InputError("params is empty: there is nothing to differentiate; pass dict(model.named_parameters())")
        own = self._model.parameters()
        for name, p in params.items():
            self._check_parameter(name, p, own)
        trainable = [k for k in params if not own or own[k].requires_grad]
        for k in trainable:
            if not (params[k].is_floating_point() or params[k].is_complex()):
                raise InputError(f"parameter '{k}' has dtype {params[k].dtype}; only floating-point and complex ones have gradients")
            if params[k]._backward_hooks:
                raise InputError(f"parameter '{k}' has a tensor hook, which a pure function cannot run; pass params[{k!r}].detach()")
        full = dict(params) | {k: p for k, p in own.items() if k not in params}
        return Call(full, trainable, x, y, trees.batch_size(x, y))

    def _check_parameter(self, name: str, p: Any, own: dict[str, Tensor]) -> None:
        if not isinstance(p, Tensor):
            raise InputError(f"params[{name!r}] is {type(p).__name__}, not a tensor")
        if not self._model.is_module:
            return
        if name not in own:
            raise InputError(f"the model has no parameter '{name}'{self._alias(name)}; it has {_some(own)}")
        if p.shape != own[name].shape:
            raise InputError(f"params[{name!r}] has shape {tuple(p.shape)}, the model's parameter {tuple(own[name].shape)}")

    def _alias(self, name: str) -> str:
        assert isinstance(self._model.model, nn.Module)
        every = dict(self._model.model.named_parameters(remove_duplicate=False))
        tied = [k for k, p in self._model.parameters().items() if p is every.get(name)]
        return f" of its own (it is tied to '{tied[0]}', the name to use)" if tied else ""


def _some(names: Mapping[str, Any]) -> str:
    first = list(names)[:8]
    return ", ".join(map(repr, first)) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class PerExampleGrad(Transform):
    """`(params, x, y) -> {name: (B, *shape)}`; made by `per_example_grad`."""

    def __call__(self, params: Params, x: Any, y: Any = None) -> dict[str, Tensor]:
        return self._value_and_grad(params, x, y)[1]

    def _value_and_grad(self, params: Params, x: Any, y: Any) -> tuple[Tensor, dict[str, Tensor]]:
        call = self._check(params, x, y)
        if call.batch == 0:
            losses = next(iter(call.params.values())).new_zeros(0)
            return losses, {k: call.params[k].new_zeros(0, *call.params[k].shape) for k in call.trainable}
        parts = [self._jacobian(c) for c in self._chunks(call)]
        if len(parts) == 1:
            return parts[0].losses, parts[0].rows()
        rows = [part.rows() for part in parts]
        return torch.cat([p.losses for p in parts]), {k: torch.cat([r[k] for r in rows]) for k in call.trainable}


class PerExampleValueAndGrad(PerExampleGrad):
    """`(params, x, y) -> (losses (B,), {name: (B, *shape)})`; made by `per_example_value_and_grad`."""

    def __call__(self, params: Params, x: Any, y: Any = None) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        return self._value_and_grad(params, x, y)


@dataclass(frozen=True)
class Clipped:
    """The result of `clipped_grad`."""

    grads: dict[str, Tensor]  # the sum over the batch of clipped per-example gradients, by name
    norms: Tensor  # (B,), before clipping
    losses: Tensor  # (B,)


class ClippedGrad(Transform):
    """`(params, x, y) -> Clipped`; made by `clipped_grad`."""

    def __init__(self, model: Model, loss: Loss, options: Options, max_norm: float):
        super().__init__(model, loss, options)
        if not isinstance(max_norm, int | float) or isinstance(max_norm, bool) or not max_norm > 0:
            raise InputError(f"max_norm={max_norm!r} must be a positive number")
        self._max_norm = max_norm

    def __call__(self, params: Params, x: Any, y: Any = None) -> Clipped:
        call = self._check(params, x, y)
        if call.batch == 0:
            none = next(iter(call.params.values())).new_zeros(0)
            return Clipped({k: torch.zeros_like(call.params[k]) for k in call.trainable}, none, none)
        parts = [self._clip(self._jacobian(c)) for c in self._chunks(call)]
        grads = {k: sum((p.grads[k] for p in parts[1:]), parts[0].grads[k]) for k in call.trainable}
        return Clipped(grads, torch.cat([p.norms for p in parts]), torch.cat([p.losses for p in parts]))

    def _clip(self, jacobian: Jacobian) -> Clipped:
        norms = jacobian.norms()
        weights = 1 / torch.clamp(norms / self._max_norm, min=1)
        return Clipped(jacobian.vjp(weights), norms, jacobian.losses)


def per_example_grad(
    model: Model, loss: Loss = F.cross_entropy, *, strategy: str = "crb", chunk_size: int | None = None,
    create_graph: bool = False, verify: bool = True, conv_rule: str = "auto",
) -> PerExampleGrad:  # fmt: skip
    """The gradient of every example's own loss, as a function of the parameters.

    >>> model = torch.nn.Linear(3, 2)
    >>> grads = per_example_grad(model)(dict(model.named_parameters()), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
    >>> grads["weight"].shape
    torch.Size([5, 2, 3])

    Row b is the gradient of `loss(model(x_b), y_b).sum()`, where x_b, y_b are example b as a batch of one.

    Args:
        model: an `nn.Module`, or a function `f(params, *inputs) -> output`.
        loss: `loss(output, y)`, giving one number, or (B, ...) losses of each example.
        strategy: `"crb"` (one forward, one backward, a rule for each operation), `"multi"` (one alias of the parameters
            per example) or `"naive"` (a loop): Rochette et al., arXiv 1912.06015, section 3.
        chunk_size: work through the batch this many examples at a time; the same answer in less memory.
        create_graph: make the result differentiable in `params` and `x`.
        verify: check a new trace against the definition on two examples.
        conv_rule: how rows of convolution weights are computed: `"auto"`, `"grouped"` (the paper's), `"unfold"`, `"loop"`.

    Returns:
        A pure function `(params, x, y=None) -> {name: (B, *shape)}`. `x` is a tensor (`model(x)`), a tuple (`model(*x)`) or a
        dict (`model(**x)`) with the batch on dimension 0 of every tensor; `params` maps names to tensors, of which those
        with `requires_grad` in the model are differentiated; names left out keep the model's own values.

    Raises:
        PexgradError: where the arguments do not fit, the examples mix, or the model cannot be traced.
    """
    return PerExampleGrad(model, loss, Options(strategy, chunk_size, create_graph, verify, conv_rule))


def per_example_value_and_grad(
    model: Model, loss: Loss = F.cross_entropy, *, strategy: str = "crb", chunk_size: int | None = None,
    create_graph: bool = False, verify: bool = True, conv_rule: str = "auto",
) -> PerExampleValueAndGrad:  # fmt: skip
    """`per_example_grad` that also returns the losses: `(params, x, y) -> (losses (B,), {name: (B, *shape)})`.

    Arguments and errors are those of `per_example_grad`.
    """
    return PerExampleValueAndGrad(model, loss, Options(strategy, chunk_size, create_graph, verify, conv_rule))


def clipped_grad(
    model: Model, loss: Loss = F.cross_entropy, *, max_norm: float, strategy: str = "crb", chunk_size: int | None = None,
    create_graph: bool = False, verify: bool = True, conv_rule: str = "auto",
) -> ClippedGrad:  # fmt: skip
    """The sum over the batch of per-example gradients, each scaled to a norm of at most `max_norm`.

    sum_b g_b / max(1, |g_b| / max_norm): Abadi et al. 2016 (arXiv 1607.00133), algorithm 1.

    Args:
        model, loss, strategy, chunk_size, create_graph, verify, conv_rule: as for `per_example_grad`.
        max_norm: the bound C on each example's gradient over all parameters together, in the units of the gradient.

    Returns:
        A pure function `(params, x, y=None) -> Clipped` with `grads` (the sum, by name), `norms` (B,) before clipping, and
        `losses` (B,).

    Raises:
        PexgradError: as for `per_example_grad`, and where `max_norm` is not a positive number.
    """
    return ClippedGrad(model, loss, Options(strategy, chunk_size, create_graph, verify, conv_rule), max_norm)
