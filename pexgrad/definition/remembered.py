"""What a model writes into itself in its forward, and the loss reads there: a term that no copy of the model shows.

`self.aux = gate.square().mean()` in the forward and `model.aux` in the loss: every strategy runs copies of the model around other
parameters, while the loss looks at the model itself, and finds what an earlier call has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..base import trees
from ..base.still import StandStill
from ..errors import LossError
from ..inputs.call import Call
from ..inputs.contents import plain_attributes
from ..inputs.reached import reached
from ..inputs.rebind import Bound, rebind, shared, uncached
from ..inputs.walk import walked


def refuse_remembered(model: Bound, loss: Any, call: Call) -> None:
    """Raise where the loss reads an attribute that the model's forward fills with something computed from parameters."""
    if not isinstance(model.model, nn.Module) or not call.batch:
        return
    own = {id(m): m for m in model.model.modules()}
    walk = walked(loss, around=[m for m in own.values() if m is not loss])
    read = {type(own[id(r)]) for r in walk.found.references if id(r) in own}
    code = [held for held in walk.holders if isinstance(held, FunctionType)]
    named = frozenset[str]().union(*(reached(code, kind) for kind in read))  # in methods that it calls, too
    if not named:
        return
    for name in _filled(model.model, call):
        if name in named:
            raise LossError(
                f"the loss reads '{name}' from the model, where its forward writes what it computes from parameters; a pure "
                "function leaves the model as it is, so that term would be missing: let the model return it"
            )


def _filled(model: nn.Module, call: Call) -> Iterator[str]:
    """The attributes into which a forward has put what autograd follows."""
    buffers = {k: b.detach().clone() for k, b in call.module.buffers.items()}
    # copies: an embedding may renormalise its rows
    params = {k: p.detach().clone().requires_grad_(k in call.trainable) for k, p in call.params.items()}
    copied = rebind(model, params | buffers)
    args, kwargs = trees.as_call(trees.map_tensors(torch.clone, call.examples(0, 1).x))
    before = {id(t) for m in copied.modules() for t in shared(vars(m))}
    with StandStill(), torch.enable_grad(), uncached():
        copied(*args, **kwargs)
    for module in copied.modules():
        for name, held in plain_attributes(module).items():
            if any(
                isinstance(t, Tensor) and t.grad_fn is not None and id(t) not in before for t in shared(held)
            ):
                yield name
