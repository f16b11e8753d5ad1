"""Models composed at random of layers, shape operations, sharing, in-place code and folds, against the loop."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, param, wave
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_rows_equal, rows_of
from torch.utils.checkpoint import checkpoint

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

# A step takes h (B, t, c) to (B, t', c'): make(t, c) gives its parameters and layers, forward(h, *them), and (t', c').
STEPS = {}


def step(make):
    STEPS[make.__name__] = make
    return make


@step
def linear(t, c):
    return [nn.Linear(c, 3)], lambda h, f: f(h), (t, 3)


@step
def linear_without_bias_then_in_place(t, c):
    return [nn.Linear(c, 2, bias=False)], lambda h, f: f(h).sigmoid_(), (t, 2)


@step
def convolution(t, c):
    return [nn.Conv1d(c, 4, 3, padding=1)], lambda h, f: f(h.mT).mT, (t, 4)


@step
def depthwise(t, c):
    return [nn.Conv1d(c, c, 2, padding=1, groups=c)], lambda h, f: torch.tanh_(f(h.mT)).mT[:, :t], (t, c)


@step
def transposed_convolution(t, c):
    return [nn.ConvTranspose1d(c, 2, 2, stride=2)], lambda h, f: f(h.mT).mT[:, : t + 1], (t + 1, 2)


@step
def layer_norm(t, c):
    return [nn.LayerNorm(c)], lambda h, f: f(h), (t, c)


@step
def group_norm(t, c):
    return [nn.GroupNorm(1, c)], lambda h, f: f(h.mT).mT, (t, c)


@step
def prelu(t, c):
    return [nn.PReLU(c)], lambda h, f: f(h.mT).mT, (t, c)


@step
def bias(t, c):
    return [param(c)], lambda h, p: h + p, (t, c)


@step
def bias_in_place(t, c):
    def forward(h, p):
        h = h * 1.5
        h += p
        return h

    return [param(t, 1)], forward, (t, c)


@step
def write_into_a_slice(t, c):
    def forward(h, p):
        h = h.clone()
        h[:, 0] *= p
        h[:, -1].add_(1)
        return h

    return [param(c)], forward, (t, c)


@step
def write_a_parameter_into_a_slice(t, c):
    def forward(h, p):
        h = h.clone()
        h[:, 0] = p
        return h

    return [param(c)], forward, (t, c)


@step
def linear_then_write_into_a_slice(t, c):
    def forward(h, f):
        h = f(h)
        h[..., 0] += 1
        h[:, :1].relu_()
        return h

    return [nn.Linear(c, 3)], forward, (t, 3)


@step
def scale_twice(t, c):
    return [param(c)], lambda h, p: h * p.exp() - p * h.cos(), (t, c)


@step
def outer_fold(t, c):
    return [nn.Linear(c, 4)], lambda h, f: f(h.reshape(-1, c)).tanh().view(-1, t, 4), (t, 4)


@step
def inner_fold(t, c):
    def forward(h, f):
        return f(h.transpose(0, 1).reshape(-1, c)).view(t, -1, 2).transpose(0, 1)

    return [nn.Linear(c, 2)], forward, (t, 2)


@step
def fold_with_bias(t, c):
    return [param(c)], lambda h, p: (h.reshape(-1, c) + p).sin().reshape(-1, t, c), (t, c)


@step
def time_major(t, c):
    return [nn.Linear(c, 3), nn.LayerNorm(3)], lambda h, f, n: n(f(h.transpose(0, 1))).transpose(0, 1), (t, 3)


@step
def product_on_the_right(t, c):
    return [param(c, 3)], lambda h, w: h @ w, (t, 3)


@step
def product_on_the_left(t, c):
    return [param(2, t)], lambda h, w: w @ h, (2, c)


@step
def product_in_place(t, c):
    return [param(c, 3)], lambda h, w: (h @ w).mul_(0.5), (t, 3)


@step
def einsum(t, c):
    return [param(2, c, t)], lambda h, w: torch.einsum("btc,kct->bkc", h, w), (2, c)


@step
def transposed_weight(t, c):
    return [param(c, 3)], lambda h, w: F.linear(h, w.t()) + w.sum(0), (t, 3)


@step
def part_of_a_weight(t, c):
    return [param(4, c + 1)], lambda h, w: F.linear(h, w[1:3, :c], w[:2, -1]), (t, 2)


@step
def normalised_weight(t, c):
    return [param(3, c)], lambda h, w: F.linear(h, F.normalize(w, dim=1)), (t, 3)


@step
def low_rank(t, c):
    return [param(3, 1), param(1, c)], lambda h, a, b: F.linear(h, a @ b), (t, 3)


@step
def class_token(t, c):
    return [param(1, 1, c)], lambda h, p: torch.cat([p.expand(h.shape[0], -1, -1), h], 1), (t + 1, c)


@step
def position_embedding(t, c):
    return [nn.Embedding(t, c)], lambda h, f: h + f(torch.arange(h.shape[1])), (t, c)


@step
def looked_up_by_the_input(t, c):
    return [param(3, c)], lambda h, p: h + p[(h.detach().sum(-1) > 0).long()], (t, c)


@step
def attention(t, c):
    def forward(h, qkv, bias):
        q, k, v = qkv(h).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return [nn.Linear(c, 6), param(t, t)], forward, (t, 2)


@step
def multihead_attention(t, c):
    attend = nn.MultiheadAttention(c, 1)  # the batch on dimension 1
    return [attend], lambda h, f: f(*[h.transpose(0, 1)] * 3)[0].transpose(0, 1), (t, c)


@step
def recurrent(t, c):
    return [nn.GRU(c, 2, batch_first=True)], lambda h, f: f(h)[0], (t, 2)


@step
def cell_over_time(t, c):
    def forward(h, cell):
        state, states = h.new_zeros(h.shape[0], 2), []
        for k in range(h.shape[1]):
            state = cell(h[:, k], state)
            states.append(state)
        return torch.stack(states, 1)

    return [nn.RNNCell(c, 2)], forward, (t, 2)


@step
def checkpointed(t, c):
    return [nn.Linear(c, 3)], lambda h, f: checkpoint(f, h, use_reentrant=False).relu(), (t, 3)


@step
def residual(t, c):
    return [nn.Linear(c, c)], lambda h, f: h + f(h).relu_(), (t, c)


@step
def gate_without_gradient(t, c):
    def forward(h, f):
        with torch.no_grad():
            gate = f(h).sigmoid()
        return h * gate + f(h).detach()

    return [nn.Linear(c, c)], forward, (t, c)


@step
def where(t, c):
    return [param(c)], lambda h, p: torch.where(h > 0, h, p), (t, c)


@step
def softmax_over_time(t, c):
    return [], lambda h: h.softmax(1) + h.cumsum(1), (t, c)


@step
def swap(t, c):
    return [], lambda h: h.mT, (c, t)


@step
def flip_and_roll(t, c):
    return [], lambda h: h.flip(1).roll(1, 2), (t, c)


@step
def pool(t, c):
    return [], lambda h: h.mean(1, keepdim=True), (1, c)


@step
def stack_of_views(t, c):
    return [param(1)], lambda h, p: torch.stack([h[:, 0], h[:, -1] * p], 1), (2, c)


@step
def tanh_in_place_on_a_view(t, c):
    def forward(h, f):
        h = f(h)
        h.flatten(1).tanh_()
        return h

    return [nn.Linear(c, 2)], forward, (t, 2)


@step
def repeated_parameter(t, c):
    return [param(1, c)], lambda h, p: h * p.repeat(t, 1).cos(), (t, c)


@step
def scalar_and_temperature(t, c):
    return [nn.Parameter(torch.tensor(0.3))], lambda h, p: h / p.exp() + p, (t, c)


@dataclass(frozen=True)
class Program:
    """The names of steps; a number repeats an earlier step, with its parameters, where its input fits."""

    steps: tuple[str | int, ...]
    batch: int
    seed: int

    def build(self):
        torch.manual_seed(self.seed)
        shape, members, run = (2, 3), {}, []
        for i, name in enumerate(self.steps):
            if isinstance(name, int):
                same = [r for r in run if r[2] == shape]
                if not same:
                    continue
                run.append(same[name % len(same)])
            else:
                own, forward, after = STEPS[name](*shape)
                names = [f"s{i}_{j}" for j in range(len(own))]
                members |= dict(zip(names, own, strict=True))
                run.append((names, forward, shape, after))
            shape = run[-1][3]

        def forward(s, h):
            for names, f, _, _ in run:
                h = f(h, *(getattr(s, n) for n in names))
            return h

        members.setdefault("last", param(shape[1]))
        return Net(lambda s, h: forward(s, h) * s.last, **members), torch.randn(self.batch, 2, 3)


def programs():
    names = st.one_of(st.sampled_from(sorted(STEPS)), st.integers(0, 3))
    steps = st.lists(names, min_size=1, max_size=6).map(tuple)
    return st.builds(Program, steps, st.integers(1, 4), st.integers(0, 99))


@settings(max_examples=int(os.environ.get("PROGRAMS", "50")), derandomize="PROGRAMS" not in os.environ)
@given(program=programs())
def test_rows_of_a_random_program(program):
    model, x = program.build()
    want = rows_of(model, wave, x, None)
    got = pexgrad.per_example_grad(model, wave, verify=False)(dict(model.named_parameters()), x)
    assert_rows_equal(got, want, 1e-8)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_step_alone_and_repeated(name):
    model, x = Program((name, 0, name), 3, 0).build()
    got = pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), x)
    assert_rows_equal(got, rows_of(model, wave, x, None), 1e-8)
