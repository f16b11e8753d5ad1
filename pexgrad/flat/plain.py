"""Which models and losses a recorded graph can stand in for at every call, whatever the values.

These are lists of what is known to be safe. Other operations check values that a recording does not have, choose an algorithm
for the batch at hand, draw random numbers, or call the user's code. Other losses may keep a number, print, or read a clock.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..losses.loss import LossFunction
from ..stages.tap import gradient_edge, own_memory

aten = torch.ops.aten

_OPERATIONS = frozenset({
    aten.linear.default, aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.gelu.default, aten.silu.default,
    aten.leaky_relu.default, aten.elu.default, aten.softplus.default, aten.layer_norm.default, aten.softmax.int,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.flatten.using_ints, aten.view.default, aten.reshape.default,
    aten.sym_size.int, operator.getitem, operator.mul, gradient_edge, own_memory,
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.max_pool1d.default, aten.max_pool2d.default,
    aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.group_norm.default, aten.relu_.default,
    aten.matmul.default, aten.addmm.default, aten.bmm.default, aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor,
    aten.neg.default, aten.exp.default, aten.square.default, aten.zeros.default, aten.clone.default, aten.expand.default,
    aten.transpose.int, aten.t.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.chunk.default, aten.split.Tensor, aten.stack.default,
    aten.cat.default, aten.embedding.default,
})  # fmt: skip

# Of the user's own losses, those of straight code: no branches, loops, handlers, imports, and nothing stored but local names.
_INSTRUCTIONS = (
    "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "BINARY_", "UNARY_", "CALL", "RETURN_",
)  # fmt: skip
_MACHINERY = frozenset({
    "RESUME", "NOP", "CACHE", "PRECALL", "KW_NAMES", "PUSH_NULL", "POP_TOP", "COPY", "SWAP", "EXTENDED_ARG", "BUILD_TUPLE",
    "ROT_TWO", "ROT_THREE", "DUP_TOP", "COMPARE_OP",
})  # fmt: skip
_MODULES = (torch, nn, F)
# functions of torch and methods of its tensors that change nothing, draw nothing, and check no values but in their kernels
_NAMES = frozenset({
    "nn", "functional", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "soft_margin_loss",
    "log_softmax", "softmax", "logsigmoid", "sigmoid", "softplus", "tanh", "relu", "exp", "square", "abs",
    "sum", "mean", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "shape", "size", "float",
})  # fmt: skip


def is_plain(graph: fx.Graph) -> bool:
    """Whether a model is made of such operations."""
    nodes = (n for n in graph.nodes if n.op not in ("placeholder", "output"))
    return all(n.target in _OPERATIONS for n in nodes)


def is_plain_loss(losses: LossFunction) -> bool:
    """Whether a loss is torch's own, or straight code that calls nothing but such functions on plain tensors."""
    return losses.vectorised is not None or _is_straight(losses.loss)


def _is_straight(function: Callable[..., Any]) -> bool:
    if type(function) is not FunctionType or function.__closure__:
        return False
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    constant = all(type(v) in (int, float, bool, str, type(None)) for v in defaults)
    code, values = function.__code__, function.__globals__
    modules = frozenset(name for name in code.co_names if any(values.get(name) is m for m in _MODULES))
    return constant and _instructions_allow(code, modules)


@functools.lru_cache(maxsize=256)
def _instructions_allow(code: CodeType, modules: frozenset[str]) -> bool:
    return all(_is_allowed(i, modules) for i in dis.get_instructions(code))


def _is_allowed(instruction: dis.Instruction, modules: frozenset[str]) -> bool:
    name, argument = instruction.opname, instruction.argval
    if name.startswith("LOAD_GLOBAL"):
        return argument in modules
    if name.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        return argument in _NAMES
    in_place = name == "BINARY_OP" and instruction.argrepr.endswith("=")
    return (name.startswith(_INSTRUCTIONS) or name in _MACHINERY) and not in_place
