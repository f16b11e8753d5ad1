"""A structural copy of a module around other tensors.

`copy.deepcopy` with a memo that sends every parameter and buffer to its replacement gives a module
with the same code and structure, in which *every* reference to those tensors (a recurrent layer's
flat list of weights, a tied head, a parametrisation) is the replacement. The original is never touched.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..base import trees
from ..errors import InputError, TraceError
from .classes import is_users, own_members
from .contents import plain_attributes
from .generators import is_generator
from .rewire import rewire
from .walk import walked


def shared(value: Any, depth: int = 3) -> Iterator[Any]:
    """What a plain attribute holds that a copy shares: generators, which go on, and tensors, such as caches and constants.

    And the tensors of a module that is not one of the model's, such as a teacher in a list.
    """
    if isinstance(value, Tensor | torch.Generator) or is_generator(value):
        yield value
    elif isinstance(value, nn.Module):
        # in training its buffers are written to: they are copied
        yield from value.parameters() if value.training else named_tensors(value).values()
    elif depth and isinstance(value, Mapping | list | tuple | set):
        inside: list[Any] = []
        with contextlib.suppress(Exception):  # a class of the user's may refuse to be gone through
            inside = list(value.values() if isinstance(value, Mapping) else value)
        for v in inside:
            yield from shared(v, depth - 1)
    elif depth and is_users(type(value)):
        for v in getattr(value, "__dict__", {}).values():
            if isinstance(v, nn.Module):
                yield from shared(v)


def rebind(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` whose parameters and buffers are `tensors`, by name; names left out are shared."""
    # each process has the rows of its own examples
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return rebind(model.module, {k.removeprefix("module."): t for k, t in tensors.items()})
    memo: dict[int, Any] = {}
    for module in model.modules():
        for v in shared(plain_attributes(module)):
            memo[id(v)] = v
    for name, t in named_tensors(model).items():
        memo[id(t)] = _passing_for(t, tensors[name]) if name in tensors else t
    try:
        try:
            copied = _copied(model, made := dict(memo))
        except Exception:  # noqa: BLE001 - a lock, a generator, a handle: whatever cannot be copied is shared
            copied = _copied(model, made := memo | _uncopyable(model, memo))
        rewire(copied, made)
        return copied
    except Exception as e:
        raise TraceError(
            f"{type(model).__name__} cannot be copied structurally: {type(e).__name__}: {e}; "
            "make it work with copy.deepcopy, or pass a function f(params, x) instead of the module"
        ) from e


_OWN_WAYS = ("__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy` that does not ask the user's classes how: what they say may be meant for files, and leave something out."""
    modules = [m for m in model.modules() if _has_own_way(m)]
    # one that leaves out what has no copy knows better
    objects = [o for o in walked(model).holders if _has_own_way(o) and _has_copy(vars(o), memo)]
    own = {id(o): o for o in (*modules, *objects) if id(o) not in memo}
    memo |= {i: object.__new__(type(o)) for i, o in own.items()}
    for i, o in own.items():
        vars(memo[i]).update(copy.deepcopy(vars(o), memo))
    return copy.deepcopy(model, memo)


def _has_own_way(value: Any) -> bool:
    """Whether the user's class says how to copy an object that is nothing but its attributes."""
    kind = type(value)
    if not hasattr(value, "__dict__") or own_members(kind).keys().isdisjoint(_OWN_WAYS):
        return False
    try:  # a container is its items, too, and what is compiled is more than one can see
        return kind.__new__ is object.__new__ and object.__new__(kind) is not None
    except TypeError:
        return False


def _has_copy(value: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # noqa: BLE001 - no matter why
        return False
    return True


def _passing_for(t: Tensor, other: Tensor) -> Tensor:
    """`other` in the place of `t`: code that asks finds a parameter where `t` is one, and the attributes of `t`."""
    kind, plain = type(t), nn.Parameter.__torch_function__
    if isinstance(t, nn.Parameter):
        vars(other)["_is_param"] = True
        if type(other) is Tensor and issubclass(kind, nn.Parameter) and kind.__torch_function__ is plain:
            other.__class__ = kind
    vars(other).update(vars(t))
    return other


def _uncopyable(model: nn.Module, memo: Mapping[int, Any]) -> dict[int, Any]:
    """What the modules' plain attributes hold that has no copy."""
    found = {}
    for module in model.modules():
        for key, value in vars(module).items():
            if key in ("_modules", "_parameters", "_buffers"):
                continue
            if not _has_copy(value, dict(memo) | {id(m): m for m in model.modules()}):
                found[id(value)] = value
    return found


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, by name; a tied one once. A class's own `named_parameters()` may leave some out."""
    return dict(nn.Module.named_parameters(model)) | dict(nn.Module.named_buffers(model))


class Bound:
    """A model, module or function, whose forward can be taken at any parameters and buffers."""

    def __init__(self, model: nn.Module | Callable[..., Any]):
        for path, m in model.named_modules() if isinstance(model, nn.Module) else ():
            if isinstance(m, torch.jit.ScriptModule):
                what = f"the module at '{path}'" if path else "the model"
                raise InputError(
                    f"{what} is scripted ({m.original_name}), and TorchScript keeps its parameters to itself; pass the Python "
                    "module that it was made of"
                )
        self.model = model
        self.is_module = isinstance(model, nn.Module)
        self._module = model if isinstance(model, nn.Module) else nn.Module()  # an empty one holds nothing

    def parameters(self) -> dict[str, Tensor]:
        """The module's own parameters; nothing for a function."""
        return dict(nn.Module.named_parameters(self._module))

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers; nothing for a function."""
        return dict(nn.Module.named_buffers(self._module))

    def writes_to_parameters(self) -> bool:
        """Whether a forward changes parameters in place, as embeddings with `max_norm` do."""
        return any(getattr(m, "max_norm", None) is not None for m in self._module.modules())

    def at(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The forward function at these parameters and buffers."""
        if isinstance(self.model, nn.Module):
            return rebind(self.model, {**params, **buffers})
        function = self.model
        return lambda *args, **kwargs: function(dict(params), *args, **kwargs)

    def fresh(self, params: dict[str, Tensor]) -> Callable[..., Any]:
        """The forward function at these parameters and copies of the buffers, free to be changed."""
        copies = {k: b.detach().clone() for k, b in self.buffers().items()}
        forward = self.at(params, copies)
        if not (isinstance(forward, nn.Module) and _reaches(forward, self._module)):
            return forward
        mode = _Substitution({id(t): (params | copies)[k] for k, t in named_tensors(self._module).items()})

        def substituted(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return forward(*args, **kwargs)

        return substituted

    def run(self, params: dict[str, Tensor], x: Any) -> Any:
        """The output at these parameters, into which the model may write; of the inputs and buffers it gets copies."""
        args, kwargs = trees.as_call(trees.map_tensors(torch.clone, x))
        with uncached():
            return self.fresh(params)(*args, **kwargs)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Without the cache of `parametrize.cached()`, which would take the weights of a module's copy for the module's own."""
    before = parametrize._cache
    if not parametrize._cache_enabled:
        yield
        return
    parametrize._cache = {}
    try:
        yield
    finally:  # another thread may have been the last to need them
        parametrize._cache = before if parametrize._cache_enabled else {}


def _reaches(copied: nn.Module, model: nn.Module) -> bool:
    """Whether code of a copy finds tensors or modules of the model: among globals, say, which no copy changes."""
    own = {id(v) for v in (*model.modules(), *named_tensors(model).values())}
    found = walked(copied).found
    return any(id(v) in own for v in (*found.references, *found.loose.values()))


class _Substitution(TorchFunctionMode):
    """Every operation sees the replacement of a tensor wherever it is given the original."""

    def __init__(self, replacements: dict[int, Tensor]):
        super().__init__()
        self._replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda t: self._replacements.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)
