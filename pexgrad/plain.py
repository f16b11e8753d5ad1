"""Models and losses of which a recording is the same computation, whatever the values.

Other operations check values that a recording does not have, choose an algorithm for the batch at hand, draw random numbers,
or call code of the user's. Other losses may do more than operations: keep a number, print, look at the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .loss import ExampleLosses
from .tap import gradient_edge

aten = torch.ops.aten

_OPERATIONS = frozenset({
    aten.linear.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.gelu.default, aten.silu.default,
    aten.leaky_relu.default, aten.elu.default, aten.softplus.default, aten.layer_norm.default, aten.softmax.int,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.flatten.using_ints, aten.view.default, aten.reshape.default,
    aten.sym_size.int, operator.getitem, operator.mul, gradient_edge,
})  # fmt: skip

# what the code of a loss may name, as functions of torch and methods of its tensors
_NAMES = frozenset({
    "nn", "functional", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "soft_margin_loss",
    "log_softmax", "softmax", "logsigmoid", "sigmoid", "softplus", "tanh", "relu", "exp", "square", "abs",
    "sum", "mean", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "shape", "size", "float",
})  # fmt: skip
_MODULES = (torch, nn, F)


def is_plain(graph: fx.Graph) -> bool:
    """Whether a model is made of such operations."""
    nodes = (n for n in graph.nodes if n.op not in ("placeholder", "output"))
    return all(n.target in _OPERATIONS for n in nodes)


def is_plain_loss(losses: ExampleLosses) -> bool:
    """Whether a loss is torch's own, or a function whose code names nothing but operations of torch's."""
    return losses.vectorised is not None or _names_only_torch(losses.loss)


def _names_only_torch(function: Callable[..., Any]) -> bool:
    if type(function) is not FunctionType or function.__closure__:
        return False
    code, values = function.__code__, function.__globals__
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    modules = {name for name in code.co_names if any(values.get(name) is m for m in _MODULES)}
    named = set(code.co_names) - modules
    inner = any(isinstance(c, type(code)) for c in code.co_consts)
    plain = all(isinstance(v, int | float | str | None) for v in defaults)
    return named <= _NAMES and not named & values.keys() and plain and not inner
