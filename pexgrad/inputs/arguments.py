"""The arguments of a transform and of a call, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..base import trees
from ..base.checks import boolean, one_of, positive_int
from ..base.history import read_from
from ..base.memory import refuse_shared, room_for_rows
from ..base.numerics import is_inexact
from ..errors import InputError
from .call import Call
from .rebind import Bound
from .walk import snapshot

Params = Mapping[str, Tensor]

STRATEGIES = ("crb", "multi", "naive")
CONV_RULES = ("auto", "measure", "grouped", "unfold", "loop")


class OptionArguments(TypedDict, total=False):
    """The options of every transform, as keyword arguments; see `Options`."""

    strategy: str
    chunk_size: int | None
    create_graph: bool
    verify: bool
    conv_rule: str


@dataclass(frozen=True)
class Options:
    """How the gradients of examples are computed; the same keyword options for every transform.

    Attributes:
        strategy: `"crb"` (one forward, one backward, a rule for each operation), `"multi"` (one alias of the parameters
            per example) or `"naive"` (a loop): Rochette et al., arXiv 1912.06015, section 3.
        chunk_size: work through the batch this many examples at a time; the same answer in less memory.
        create_graph: make the result differentiable in `params` and `x`.
        verify: check a new trace against the definition on two examples, and refuse what looks at the whole batch.
        conv_rule: how rows of convolution weights are computed: `"auto"` (by a fitted model of their costs),
            `"measure"` (the fastest of them, timed once for each shape), `"grouped"` (the paper's), `"unfold"`, `"loop"`.

    Raises:
        InputError: where an option is none of its choices, or `chunk_size` is not a positive integer.
    """

    strategy: str = "crb"
    chunk_size: int | None = None
    create_graph: bool = False
    verify: bool = True
    conv_rule: str = "auto"

    @classmethod
    def of(cls, given: OptionArguments) -> Options:
        """From keyword arguments."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise InputError(
                    f"there is no option {name!r}; every transform takes {', '.join(cls.__dataclass_fields__)}"
                )
        return cls(**given)

    def __post_init__(self) -> None:
        one_of(self.strategy, STRATEGIES, "strategy")
        if self.chunk_size is not None:
            positive_int(self.chunk_size, "chunk_size")
        boolean(self.create_graph, "create_graph")
        boolean(self.verify, "verify")
        one_of(self.conv_rule, CONV_RULES, "conv_rule")


def check_functions(model: Any, loss: Any) -> None:
    """Raise where a model or a loss is none."""
    if not callable(model):
        raise InputError(
            f"model must be an nn.Module or a function f(params, *inputs), not {type(model).__name__}"
        )
    if not callable(loss):
        raise InputError(f"loss must be a function loss(output, y), not {type(loss).__name__}")
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}; pass an instance of it, {loss.__name__}()")


def check_call(model: Bound, params: Params, x: Any, y: Any) -> Call:
    """Check what a call is given and complete its parameters with the model's own."""
    if not isinstance(params, Mapping):
        raise InputError(f"params must be a dict of tensors by name, not {type(params).__name__}")
    if not params:
        raise InputError(
            "params is empty: there is nothing to differentiate; pass dict(model.named_parameters())"
        )
    module = snapshot(model.model)
    own = module.parameters
    for name, p in params.items():
        _check_parameter(model, name, p, own)
    trainable = [k for k in params if not own or own[k].requires_grad]
    for k in trainable:
        _check_trainable(k, params[k])
    full = dict(params) | {k: p for k, p in own.items() if k not in params}
    _check_buffers(module.buffers, own, trainable)
    leaves, targets = trees.flatten(trees.as_call(x))[0], trees.flatten(y)[0]
    batch = trees.batch_size(leaves, targets)
    if any(isinstance(t, Tensor) and t.is_meta for t in (*full.values(), *leaves, *targets)):
        raise InputError("there are tensors on the meta device, which have no numbers")
    return Call(full, trainable, list(module.buffers.values()), x, y, batch, module)


def check_out(out: Mapping[str, Tensor], call: Call, create_graph: bool) -> dict[str, Tensor]:
    """The first B rows of each buffer in `out`."""
    if create_graph:
        raise InputError("out= takes plain numbers, which cannot be differentiated: leave create_graph off")
    found = room_for_rows(out, {k: call.params[k] for k in call.trainable}, call.batch)
    read = [("a parameter", t) for t in call.params.values()] + [("a buffer", t) for t in call.buffers]
    read += [("x", t) for t in call.inputs()] + [("y", t) for t in call.targets()]
    refuse_shared(found, read)
    return found


def _check_parameter(model: Bound, name: str, p: Any, own: dict[str, Tensor]) -> None:
    if not isinstance(p, Tensor):
        raise InputError(f"params[{name!r}] is {type(p).__name__}, not a tensor")
    if is_lazy(p):
        raise InputError(
            f"parameter '{name}' is lazy and has no shape yet; call the model once with a batch before"
        )
    if not model.is_module:
        return
    if name not in own:
        raise InputError(f"the model has no parameter '{name}'{_alias(model, name)}; it has {_some(own)}")
    if p.shape != own[name].shape:
        raise InputError(
            f"params[{name!r}] has shape {tuple(p.shape)}, the model's parameter {tuple(own[name].shape)}"
        )


def _check_buffers(buffers: Mapping[str, Tensor], own: dict[str, Tensor], trainable: list[str]) -> None:
    for name, b in buffers.items():
        if b.grad_fn is not None and (read := read_from(b, {k: own[k] for k in trainable})):
            raise InputError(
                f"buffer '{name}' has been computed from {', '.join(map(repr, read))}, with autograd recording it, so that a "
                "part of the gradient goes through it to parameters as they were then; register it .detach()ed, or compute "
                "it in the forward"
            )


def _check_trainable(name: str, p: Tensor) -> None:
    if not is_inexact(p):
        raise InputError(
            f"parameter '{name}' has dtype {p.dtype}; only floating-point and complex ones have gradients"
        )
    if p._backward_hooks:
        raise InputError(
            f"parameter '{name}' has a tensor hook, which a pure function cannot run; pass params[{name!r}].detach()"
        )


def _alias(model: Bound, name: str) -> str:
    assert isinstance(model.model, nn.Module)
    every = dict(model.model.named_parameters(remove_duplicate=False))
    tied = [k for k, p in model.parameters().items() if p is every.get(name)]
    return f" of its own (it is tied to '{tied[0]}', the name to use)" if tied else ""


def _some(names: Mapping[str, Any]) -> str:
    first = list(names)[:8]
    return ", ".join(map(repr, first)) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
