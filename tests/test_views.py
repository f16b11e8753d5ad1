"""Chains of views in recorded graphs: shorter, and the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from pexgrad.flat.portable import reshape_views
from pexgrad.flat.views import shorten_views

aten = torch.ops.aten


@st.composite
def chains(draw):
    """Views one after the other, as functions, for a (3, 2, 4) tensor; small sizes are drawn often."""
    shape, steps = [3, 2, 4], []
    for _ in range(draw(st.integers(1, 7))):
        rank = len(shape)
        ones = [d for d in range(rank) if shape[d] == 1]
        kinds = ["unsqueeze", "permute", "transpose", "reshape", "flatten"]
        kind = draw(st.sampled_from(kinds + ["squeeze", "select", "back"] * bool(ones)))
        if kind == "unsqueeze":
            d = draw(st.integers(-rank - 1, rank))
            steps.append(lambda x, d=d: x.unsqueeze(d))
        elif kind == "permute":
            dims = draw(st.permutations(range(rank)))
            steps.append(lambda x, dims=dims: x.permute(dims))
        elif kind == "transpose" and rank:
            i, j = (draw(st.integers(-rank, rank - 1)) for _ in range(2))
            steps.append(lambda x, i=i, j=j: x.transpose(i, j))
        elif kind == "reshape":
            steps.append(lambda x: x.reshape(-1, 4))
        elif kind == "flatten":
            steps.append(lambda x: x.flatten())
        elif ones:
            d = draw(st.sampled_from(ones))
            steps.append(
                {
                    "squeeze": lambda x, d=d: x.squeeze(d),
                    "select": lambda x, d=d: x.select(d, 0),
                    "back": lambda x, d=d: x.squeeze(d).unsqueeze(-1),
                }[kind]
            )
        shape = list(in_turn(steps)(torch.zeros(3, 2, 4)).shape)
    return in_turn(steps)


def in_turn(steps):
    def run(x):
        for step in steps:
            x = step(x)
        return x

    return run


def recorded(function, *args, **how):
    module = make_fx(function, **how)(*args)
    reshape_views(module.graph)
    module.recompile()
    before = operations(module)
    shorten_views(module.graph)
    module.graph.lint()
    module.recompile()
    assert len(operations(module)) <= len(before)
    return module


def operations(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


@given(chains(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_chain_gives_the_same(chain, strided):
    x = torch.arange(24.0)
    x = x.view(4, 2, 3).movedim(0, -1).movedim(0, 1) if strided else x.view(3, 2, 4)
    module = recorded(lambda t: [chain(t.sin()), chain(t).cos()], x, tracing_mode="fake")
    for got, want in zip(module(x), (chain(x.sin()), chain(x).cos()), strict=True):
        assert torch.equal(got, want)
        assert got.shape == want.shape


@pytest.mark.parametrize(
    ("chain", "left"),
    [
        (lambda x: x.unsqueeze(1).unsqueeze(2).permute(0, 2, 3, 1), [aten.reshape.default]),
        (lambda x: x.unsqueeze(1).select(1, 0).unsqueeze(-1), [aten.unsqueeze.default]),
        (lambda x: x.t().t(), []),
        (lambda x: x.reshape(-1).reshape(x.shape), []),
        (
            lambda x: x.unsqueeze(1).transpose(1, 2).permute(2, 1, 0),
            [aten.unsqueeze.default, aten.permute.default],
        ),
    ],
)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_is_left(chain, left, mode):
    x = torch.randn(5, 6)
    module = recorded(lambda t: chain(t.sin()).cos(), x, tracing_mode=mode)
    sines = (aten.sin.default, aten.cos.default)
    assert [t for t in operations(module) if t not in (*sines, aten.sym_size.int)] == left
    assert torch.equal(module(x), chain(x.sin()).cos())


def test_a_copy_for_two_is_made_once():
    def two_of_one(x):
        copy = x.t().reshape(6, 2, 2)
        return copy.unsqueeze(1) * copy.unsqueeze(2).squeeze(2).unsqueeze(1)

    module = recorded(two_of_one, x := torch.randn(4, 6), tracing_mode="fake")
    assert operations(module).count(aten.reshape.default) == 1
    assert torch.equal(module(x), two_of_one(x))
