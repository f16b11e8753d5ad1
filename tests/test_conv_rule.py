"""Convolutions: the properties, every way to compute a row, and the loop over a grid of arguments."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import properties
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from oracle import assert_rows_equal, rows_of
from strategies import CONV, conv_configs, transposed_configs

import pexgrad
from pexgrad.base.numerics import dots
from pexgrad.factors import Conv, Geometry, choice
from pexgrad.factors.convolving import convolve, window_gram

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
]

RULES = ("grouped", "unfold", "loop", "auto", "measure")
CHECKS = [check for name, check in vars(properties).items() if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@given(config=conv_configs())
def test_properties(check, config):
    check(*config.build())


@given(config=conv_configs())
@settings(max_examples=40)
def test_every_way_gives_the_same_rows(config):
    layer, x = config.build()
    c = properties.cotangent_of(layer, x)
    want = rows_of(layer, properties.against, x, c)
    for rule in RULES:  # verification would find in the first what all share
        assert_rows_equal(properties.rows(layer, x, c, conv_rule=rule, verify=rule == RULES[0]), want)


@given(config=transposed_configs())
@settings(max_examples=40)
def test_transposed(config):
    properties.check_against_the_loop(*config.build())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("stride", "dilation", "groups"), list(itertools.product([1, 2, 3], [1, 2], [1, 2])))
def test_conv1d_against_the_loop(stride, dilation, groups, rule):
    """With the strides here, the output does and does not reach the end of the input."""
    layer = nn.Conv1d(2, 4, 3, stride, padding=1, dilation=dilation, groups=groups)
    for size in (9, 10):
        properties.check_against_the_loop(layer, torch.randn(2, 2, size), conv_rule=rule, verify=False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_beyond_half_the_kernel(n, dilation, rule):
    """As in the paper's networks; part of it is then written into the input."""
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1]
    layer = make(2, 3, (3, 2, 1)[:n], padding=3, dilation=dilation, stride=2)
    x = torch.randn(3, 2, *[5] * n)
    properties.check_against_the_loop(layer, x, conv_rule=rule)
    properties.check_rows_sum_to_the_ordinary_gradient(layer, x)
    params, c = dict(layer.named_parameters()), properties.cotangent_of(layer, x)
    jacobian = pexgrad.per_example_jacobian(layer, properties.against)(params, x, c)
    total = torch.autograd.grad(properties.against(layer(x), c).sum(), list(params.values()))
    assert_rows_equal(jacobian.vjp(torch.ones(3)), dict(zip(params, total, strict=True)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("padding", [0, 2, (1, 2), "same", "valid"])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_conv2d_padding(padding, mode, rule):
    layer = nn.Conv2d(2, 3, (2, 3), padding=padding, padding_mode=mode, dilation=(2, 1))
    properties.check_against_the_loop(layer, torch.randn(2, 2, 5, 6), conv_rule=rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("case", ["pointwise", "depthwise", "whole", "one_pixel", "one_channel"])
def test_extremes(case, dims, rule):
    build = CONV[dims - 1]
    layer, size = {
        "pointwise": (build(4, 6, 1), 3),
        "depthwise": (build(4, 8, 3, groups=4, padding=1), 4),
        "whole": (build(2, 3, 4), 4),
        "one_pixel": (build(2, 3, 3, padding=1), 1),
        "one_channel": (build(1, 1, 2, stride=2), 5),
    }[case]
    properties.check_against_the_loop(
        layer, torch.randn(3, layer.in_channels, *[size] * dims), conv_rule=rule
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_each_operand_has_a_rule_of_its_own(frozen, rule):
    layer = nn.Conv2d(2, 3, 3)
    getattr(layer, frozen).requires_grad_(False)
    properties.check_against_the_loop(layer, torch.randn(3, 2, 5, 5), conv_rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_batch_equal_to_every_size(rule):
    properties.check_against_the_loop(nn.Conv2d(3, 3, 3, padding=1), torch.randn(3, 3, 3, 3), conv_rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_chunks(rule):
    layer, x = nn.Conv2d(2, 3, 3, stride=2), torch.randn(5, 2, 6, 6)
    c = properties.cotangent_of(layer, x)
    want = properties.rows(layer, x, c, strategy="naive")
    assert_rows_equal(properties.rows(layer, x, c, conv_rule=rule, chunk_size=2), want)


@pytest.mark.parametrize("rule", RULES)
def test_rows_can_be_differentiated(rule):
    layer, x = nn.Conv2d(2, 2, 2, stride=2, groups=2), torch.randn(2, 2, 5, 4, requires_grad=True)
    c = properties.cotangent_of(layer, x).detach().requires_grad_()

    def value(**options):
        rows = properties.rows(layer, x, c, create_graph=True, **options)
        return torch.autograd.grad(rows["weight"].sin().sum(), [x, c])

    torch.testing.assert_close(value(conv_rule=rule), value(strategy="naive"))


# --- the parts that a rule chooses from ----------------------------------------------------------------


@st.composite
def factors(draw, dtype=torch.float64):
    """A convolution's factor, of a few positions of each example, with any geometry."""
    n = draw(st.integers(1, 3))
    some = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n))  # noqa: E731
    geometry = Geometry(some(1, 3), some(1, 3), some(0, 2), some(1, 2), draw(st.integers(1, 3)))
    batch, fold, c, d = (draw(st.integers(1, 3)) for _ in "btcd")
    least = [
        e * (k - 1) + 1 - 2 * p
        for k, p, e in zip(geometry.kernel, geometry.padding, geometry.dilation, strict=True)
    ]
    size = tuple(max(m, 1) + extra for m, extra in zip(least, some(0, 3), strict=True))
    g = geometry.groups
    x, weight = (
        torch.randn(batch * fold, g * c, *size, dtype=dtype),
        torch.randn(g * d, c, *geometry.kernel, dtype=dtype),
    )
    y = torch.randn_like(convolve(x, weight, geometry))
    parts = (v.unflatten(0, (batch, fold)) for v in (x, y))
    return Conv(*parts, geometry, tuple(weight.shape), dtype)


@given(factor=factors())
@settings(max_examples=60)
def test_every_algorithm(factor):
    want = factor._rows_by("loop", None) if factor.g.shape[1] == 1 else factor.unfolded().rows()
    for name in ("unfold", "loop", "lower", "grouped", "joint"):
        torch.testing.assert_close(factor._rows_by(name, None), want)
        torch.testing.assert_close(factor._rows_by(name, torch.empty_like(want)), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@given(data=st.data())
@settings(max_examples=60)
def test_inner_products_of_windows_from_those_of_pixels(dtype, data):
    factor = data.draw(factors(dtype))
    other = replace(factor, x=torch.randn_like(factor.x), g=torch.randn_like(factor.g))
    mine, theirs = (f.unfolded().x.movedim(2, 1) for f in (factor, other))
    got = window_gram(factor.x, other.x, factor.geometry)
    torch.testing.assert_close(got, mine @ theirs.conj().mT)
    torch.testing.assert_close(
        factor._by_windows_of(other), dots(factor.unfolded().rows(), other.unfolded().rows())
    )


def test_the_choice_is_among_what_may_be_fastest_and_into_memory_nothing_as_large_is_made():
    aligned = torch.randn(8, 1, 64, 24, 24)
    factor = Conv(
        aligned, aligned, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1), (64, 64, 3, 3), torch.float32
    )
    assert "joint" in choice.candidates(factor.work(), into_memory=False)
    assert "joint" not in choice.candidates(factor.work(), into_memory=True)
    assert "joint" not in choice.candidates(factor.work()._replace(inputs=25), into_memory=False)


@pytest.mark.parametrize(
    "second", [{"padding": 2, "dilation": 2}, {"padding": 0}, {"padding": 1, "stride": 2}], ids=str
)
def test_norms_of_one_weight_at_two_geometries(second):
    weight = torch.randn(2, 8, 3, 3)

    def f(p, x):
        h = torch.nn.functional.conv2d(x, p["w"], padding=1)
        return h.flatten(1).sum(1) ** 2 + torch.nn.functional.conv2d(x, p["w"], **second).flatten(
            1
        ).square().sum(1)

    jacobian = pexgrad.per_example_jacobian(f, lambda out, y: out)({"w": weight}, torch.randn(3, 8, 4, 4))
    torch.testing.assert_close(jacobian.norms(), jacobian.rows()["w"].flatten(1).norm(dim=1))
