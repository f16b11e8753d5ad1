"""Results of `create_graph=True` have the right derivatives, in the parameters and in x: numerical ones say so."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net
from torch.autograd import gradcheck, gradgradcheck

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def loss(out, y=None):
    """Smooth, and curved in every output."""
    flat = (out[0] if isinstance(out, tuple) else out).flatten(1)
    return (flat * torch.linspace(0.5, 1.5, flat.shape[1])).sin().sum(1)


def attention(s, x):
    return s.mha(x, x, x, need_weights=False)[0]


def tied(s, ids):
    return F.linear(s.mix(s.emb(ids)).tanh(), s.emb.weight)


def image(*channels):
    return torch.randn(3, *channels)


IDS = torch.tensor([[0, 3, 3], [1, 2, 0], [4, 4, 4]])
MODELS = {
    "conv": lambda: (nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2), image(4, 5, 5)),
    "conv_padding_mode": lambda: (nn.Conv1d(2, 3, 3, padding=1, dilation=2, padding_mode="circular"), image(2, 7)),
    "conv_transpose": lambda: (nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, groups=2), image(2, 3, 3)),
    "linear_over_positions": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), image(5, 3)),
    "linear": lambda: (nn.Linear(3, 4), image(3)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), IDS),
    "layer_norm": lambda: (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), image(4)),
    "group_norm": lambda: (nn.GroupNorm(2, 4), image(4, 3)),
    "tied": lambda: (Net(tied, emb=nn.Embedding(5, 3), mix=nn.Linear(3, 3)), IDS),
    "lstm": lambda: (nn.LSTM(2, 3, batch_first=True), image(3, 2)),
    "attention": lambda: (Net(attention, mha=nn.MultiheadAttention(4, 2, batch_first=True)), image(3, 4)),
    "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), image(3)),
    "fallback": lambda: (
        Net(lambda s, x: torch.linalg.solve(s.w, x.mT), w=nn.Parameter(torch.randn(3, 3) + 3 * torch.eye(3))),
        image(4, 3),
    ),
}  # fmt: skip

TRANSFORMS = {
    "rows": lambda model: pexgrad.per_example_grad(model, loss, create_graph=True),
    "norms": lambda model: pexgrad.per_example_grad_norm(model, loss, create_graph=True),
    "clipped": lambda model: pexgrad.clipped_grad(model, loss, max_norm=1.0, create_graph=True),
    "clipped_by_parameter": lambda model: pexgrad.clipped_grad(
        model, loss, max_norm=1.0, clip="per_parameter", create_graph=True
    ),
}


def function_of(fn, model, x):
    """The result's tensors as a function of the parameters, and of x where it is not made of ids."""
    names = [name for name, _ in model.named_parameters()]

    def f(*tensors):
        given = tensors[len(names)] if len(tensors) > len(names) else x
        return tuple(torch.utils._pytree.tree_leaves(fn(dict(zip(names, tensors, strict=False)), given)))

    inputs = [p.detach().clone().requires_grad_() for p in model.parameters()]
    return f, inputs + ([x.clone().requires_grad_()] if x.is_floating_point() else [])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives(kind, transform):
    model, x = MODELS[kind]()
    f, inputs = function_of(TRANSFORMS[transform](model), model, x)
    assert gradcheck(f, inputs, fast_mode=True)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("transform", ["rows", "norms", "clipped"])
def test_second_derivatives(kind, transform):
    model, x = MODELS[kind]()
    f, inputs = function_of(TRANSFORMS[transform](model), model, x)
    assert gradgradcheck(f, inputs, fast_mode=True)


def by_its_gradient(s, x):
    x = x if x.requires_grad else x.detach().requires_grad_()
    h = s.b(torch.tanh(s.a(x)))
    (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return torch.cat([h, slope], 1)


def by_another_way(s, x):
    return s.b(s.a(x.sin() if x.requires_grad else x.cos()))


def written_to(s, x):
    x.mul_(2)
    x[:, 0] += s.b.bias
    return s.b(torch.tanh(s.a(x)))


def hooked(s, x):
    if x.requires_grad:
        x.register_hook(lambda g: 3 * g)
    return s.b(torch.tanh(s.a(x)))


def hooked_on_the_way(s, x):
    h = 2 * x
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return s.b(torch.tanh(s.a(h)))


@pytest.mark.parametrize("forward", [by_its_gradient, by_another_way, written_to, hooked, hooked_on_the_way])
def test_code_that_asks_whether_its_input_is_differentiated(forward):
    model = Net(forward, a=nn.Linear(2, 5), b=nn.Linear(5, 1))
    params = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    fn, naive = (
        pexgrad.per_example_grad(model, loss=lambda o, y: o.square().sum(1), create_graph=True, strategy=s)
        for s in ("crb", "naive")
    )
    for b in (3, 1, 4):
        plain = torch.randn(b, 2)
        for x in (plain, plain.clone().requires_grad_()):
            given = x.detach().clone()
            rows, want = fn(params, x, None), naive(params, x, None)
            for k, r in rows.items():
                torch.testing.assert_close(r, want[k])
            if x.requires_grad:
                found, expected = (
                    torch.autograd.grad(sum(r.pow(3).sum() for r in each.values()), [x])[0]
                    for each in (rows, want)
                )
                torch.testing.assert_close(found, expected)
                assert expected.any()
            assert torch.equal(x, given)
    assert fn.trace_count == 2
