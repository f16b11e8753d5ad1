"""Fake tensors: shapes, strides and dtypes as those of numbers, and the batch sizes for which they hold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pexgrad.base.fakes import HINT, fake_batch, symbolic_mode

aten = torch.ops.aten

OPERATIONS = {
    "fold": ((5, 16), lambda x: x.view(x.shape[0] * 5, 16)),
    "fold and split": ((5, 16), lambda x: x.view(x.shape[0] * 5, 4, 4)),
    "left open": ((5, 16), lambda x: x.view(-1, 8)),
    "parts of the batch": ((6,), lambda x: x[1:].view((x.shape[0] - 1) * 2, 3)),
    "not contiguous": ((5, 16), lambda x: x.transpose(1, 2).view(x.shape[0], 4, 4, 5)),
    "no numbers": ((5, 16), lambda x: x[:, :0].contiguous().view(x.shape[0], 0, 8)),
    "one number": ((3,), lambda x: x.sum().view(1, 1).tanh()),
    "copy": ((3, 4), lambda x: x.clone()),
    "copy of integers": ((3, 4), lambda x: x.long().clone()),
    "copy in another layout": ((3, 4, 5), lambda x: x.clone(memory_format=torch.channels_last)),
    "function": ((3, 4), lambda x: F.gelu(x) + F.silu(x).sigmoid() * x.relu()),
    "bounds": ((3, 4), lambda x: x.clamp(1e-3).sqrt() + x.clamp(max=1).abs()),
    "rolled": ((5, 4), lambda x: x.roll((1, 2), (1, 2))),
    "groups": ((6, 4, 5), lambda x: F.group_norm(x, 3, torch.ones(6), torch.ones(6))),
    "statistics of groups": (
        (6, 4),
        lambda x: aten.native_group_norm(x, None, None, x.shape[0], 6, 4, 3, 1e-5)[1],
    ),
    "lines": ((5, 4), lambda x: F.layer_norm(x, (4,), torch.ones(4))),
    "statistics of lines": ((5, 4), lambda x: aten.native_layer_norm(x, [5, 4], None, None, 1e-5)[2]),
    "lines in half precision": ((5, 4), lambda x: F.layer_norm(x.bfloat16(), (4,))),
    "channels": ((6, 4, 5), lambda x: F.batch_norm(x, torch.ones(6), torch.ones(6))),
    "channels that are last": (
        (6, 4, 5),
        lambda x: F.batch_norm(x.contiguous(memory_format=torch.channels_last), torch.ones(6), torch.ones(6)),
    ),
    "padded": ((3, 4), lambda x: F.pad(x, (1, 2, 0, 0, -1, 3))),
    "padded along the batch": ((4,), lambda x: F.pad(x, (0, 0, 2, 0), value=1.0)),
    "padded in another layout": (
        (6, 4, 5),
        lambda x: F.pad(x.contiguous(memory_format=torch.channels_last), (1, -1, 2, 2)),
    ),
    "padded after it was transposed": ((3, 4), lambda x: F.pad(x.transpose(1, 2), (1, 2))),
    "function of a transposed": ((3, 4), lambda x: x.transpose(1, 2).tanh()),
    "function of integers": ((3, 4), lambda x: x.long().sin()),
    "function in half precision": ((3, 4), lambda x: x.bfloat16().cos()),
    "linear": ((4,), lambda x: F.linear(x, torch.ones(6, 4), torch.ones(6))),
    "linear along folds": ((5, 4), lambda x: F.linear(x, torch.ones(6, 4), torch.ones(6))),
    "transposed linear": ((4,), lambda x: torch.addmm(torch.ones(6), x, torch.ones(6, 4).t())),
    "contiguous again": ((3, 4, 5), lambda x: x.permute(2, 0, 3, 1).contiguous()),
    "transposed": ((3, 4), lambda x: x.transpose(-1, 0).transpose(1, 2)),
    "transposed number": ((), lambda x: x.sum().transpose(0, -1)),
    "permuted": ((3, 4, 5), lambda x: x.permute(-1, 0, 2, -3)),
    "matrix": ((4,), lambda x: x.t().t()[0].t()),
    "one dimension more": ((3, 4), lambda x: x.transpose(0, 1).unsqueeze(-1).unsqueeze(0).unsqueeze(2)),
    "as large as": ((1, 4, 1), lambda x: x.expand(2, -1, 3, 4, 5)),
    "as large as the batch": ((4,), lambda x: torch.ones(1, 4).to(x).expand(x.shape)),
    "as large as it is": ((3, 1), lambda x: x.expand(x.shape[0], 3, 1)),
    "one of a few": ((3, 4), lambda x: x[:, -1][:, 2]),
    "one example": ((3, 4), lambda x: x[2, 1:]),
    "a few": ((7, 4), lambda x: x[:, 1:-1:2, -9:2]),
    "none": ((7, 4), lambda x: x[:, 5:2, 9:]),
    "all of them": ((7,), lambda x: x[:, :][:, 0:7]),
    "some examples": ((7,), lambda x: x[1:][::2]),
    "a slice of a view": ((7, 4), lambda x: x.transpose(1, 2)[:, 1:, 3:6].unsqueeze(1)),
    "sum of equals": ((3, 4), lambda x: x + x.relu() * 2 - x / 3),
    "sum with an integer": ((3,), lambda x: x.long() + 1.5 - x.long() * 2),
    "sum of other shapes": ((3, 4), lambda x: x + x[:, :1] * x[:1] - x[..., 0, None]),
    "sum of other dtypes": ((3,), lambda x: x + x.double() + x.bfloat16()),
    "sum of other layouts": ((3, 4), lambda x: x + x.transpose(1, 2).contiguous().transpose(1, 2)),
    "sum with the batch size": ((3,), lambda x: x / x.shape[0] + 2j),
    "weighted sum": ((3,), lambda x: torch.add(x, x, alpha=2)),
    "scaled": ((4,), lambda x: torch.addmm(torch.ones(6), x, torch.ones(4, 6), beta=2, alpha=3)),
}


def described(out):
    sizes = [int(n) for n in (*out.shape, *out.stride(), out.storage_offset())]
    return sizes, out.dtype, out.device


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_are_those_of_numbers(name):
    shape, f = OPERATIONS[name]
    mode, _ = symbolic_mode()
    x = torch.zeros(HINT, *shape)
    with mode:
        got = f(fake_batch(mode, x))
    assert described(got) == described(f(x))


@pytest.mark.parametrize(
    ("f", "shape", "conditions"),
    [
        (lambda x: x.view(13, 80), (80,), {13}),
        (lambda x: x.view(x.shape[0] // 13, 13, 80), (80,), {13, 26}),
        (lambda x: F.linear(x.t(), torch.ones(3, 13), torch.ones(3)), (80,), {13}),
        (lambda x: x.view(x.shape[0] * 5, 16), (80,), {1, 2, 13, 26, 30}),
        (lambda x: x + torch.ones(13, 1), (80,), {13}),
        (lambda x: torch.ones(1, 80).expand(x.shape) + x.t()[:5].t()[:, 1, None], (80,), {1, 2, 13, 26, 30}),
    ],
    ids=[
        "the batch as a number",
        "groups of a size",
        "linear along the batch",
        "a fold",
        "a sum with a number",
        "views",
    ],
)
def test_the_batch_sizes_for_which_they_hold_are_noted(f, shape, conditions):
    mode, env = symbolic_mode()
    x = fake_batch(mode, torch.zeros(4, *shape))
    symbol = x.shape[0].node.expr
    with mode:
        f(x)
    fixed = env.replacements.get(symbol, symbol)
    hold = {b for b in (1, 2, 13, 26, 30) if fixed in (symbol, b) and holds(env, symbol, b)}
    assert hold - {1} == conditions - {1}  # torch's own functions look at a batch of one by itself


def holds(env, symbol, b):
    return all(bool(g.expr.subs(symbol, b)) for g in env.guards)


_MISFITS = (
    r"invalid for input|reduction dim|expanded size|number of sizes|out of (bounds|range)|0-dim|step must|broadcast|duplicate|"
    r"number of dimensions"
)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.view(12, 80),
        lambda x: F.linear(x, torch.ones(3, 79), torch.ones(3)),
        lambda x: x.permute(0, 0),
        lambda x: x.permute(0, 1, 0),
        lambda x: x.transpose(0, 2),
        lambda x: x[0].expand(40),
        lambda x: x.expand(2, -1, 40),
        lambda x: x.expand(80),
        lambda x: x.expand(-1, -1, 80),
        lambda x: x[0, 80],
        lambda x: x.select(2, 0),
        lambda x: x.sum().select(0, 0),
        lambda x: x.unsqueeze(3),
        lambda x: torch.ops.aten.slice.Tensor(x, 1, 0, 8, -1),
        lambda x: x + torch.ones(79),
    ],
)
def test_what_does_not_fit_is_an_error(f):
    mode, _ = symbolic_mode()
    with mode, pytest.raises((IndexError, RuntimeError, ValueError), match=_MISFITS):
        f(fake_batch(mode, torch.zeros(4, 80)))
