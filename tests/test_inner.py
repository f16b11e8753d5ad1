"""Derivatives that a model takes in its own forward: what is refused, and what is as fast as elsewhere."""

from __future__ import annotations

import pytest
import torch
from cases.case import Net, wave
from cases.inner import mlp, slope
from models import pick
from oracle import assert_rows_equal, losses_of, rows_of
from torch.func import jacfwd, jvp, vmap

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def refusal(forward, match):
    model, x = Net(forward, net=mlp(4)), torch.randn(3, 4)
    with pytest.raises(pexgrad.TraceError, match=match):
        pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), x)
    rows = pexgrad.per_example_grad(model, wave, strategy="naive")(dict(model.named_parameters()), x)
    assert_rows_equal(rows, rows_of(model, wave, x, None))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:FutureWarning", "ignore:.*torch.jit.script.*:DeprecationWarning"
)
@pytest.mark.parametrize(
    "forward", [lambda s, x: jvp(s.net, (x,), (torch.ones_like(x),))[1], lambda s, x: vmap(jacfwd(s.net))(x)]
)
def test_derivatives_in_forward_mode_are_refused(forward):
    refusal(forward, r"forward-mode derivatives \(jvp, jacfwd, hessian\)")


def test_a_change_in_place_while_gradients_are_off_is_refused():
    def forward(s, x):
        h = s.net(x)
        with torch.no_grad():
            h.mul_(2)
        return slope(s, x) * h.sin()

    refusal(
        forward,
        r"aten.mul_.Tensor \(at .*test_inner.py:\d+\) changes a value in place while gradients are off",
    )


def test_running_values_of_the_models_own_may_change_while_gradients_are_off():
    def forward(s, x):
        kept = torch.zeros_like(x)
        with torch.no_grad():
            kept.add_(s.net(x)).mul_(0.5)
        return slope(s, x) * kept

    model, x = Net(forward, net=mlp(4)), torch.randn(3, 4)
    for verify in (True, False):
        fn = pexgrad.per_example_grad(model, wave, verify=verify)
        assert_rows_equal(fn(dict(model.named_parameters()), x), rows_of(model, wave, x, None))


@pytest.mark.parametrize(
    "case",
    pick(
        "residual_of_a_differential_equation score_of_convolutions energy_and_forces second_derivatives_by_transforms"
    ),
    ids=lambda case: case.name,
)
def test_there_are_rules_for_what_derivatives_are_made_of(case):
    """No example by itself, and one flat graph for every batch size."""
    if "may_refuse" in case.tags:
        pytest.skip("this torch has no vmap for every batch size")
    model, x, y, loss = case.build()
    params = dict(model.named_parameters())
    fn = pexgrad.per_example_grad(model, loss)
    assert not any("fallback" in line.flags for line in fn.explain(params, x, y).lines)
    graph = fn.lower(params, x, y)
    for b in (1, 4):
        _, x, y, loss = case.build(b)
        assert_rows_equal(graph(params, x, y), rows_of(model, loss, x, y))


def test_the_tangent_kernel_of_a_differential_equation():
    """Inner products of gradients of residuals, in which networks of this kind are studied."""
    model, x, _, _ = pick("residual_of_a_differential_equation")[0].build(4)
    rows = rows_of(model, lambda out, y: out[:, 0], x, None)
    flat = torch.cat([r.flatten(1) for r in rows.values()], 1)
    kernel = pexgrad.per_example_jacobian(model, lambda out, y: out[:, 0])(
        dict(model.named_parameters()), x
    ).gram()
    torch.testing.assert_close(kernel, flat @ flat.T, rtol=1e-9, atol=1e-9)


def test_autocast_switched_off_inside():
    """The graph has the casts in it."""

    def forward(s, x):
        with torch.autocast("cpu", enabled=False):
            return slope(s, x)

    model, x = Net(forward, net=mlp(4)).float(), 100 * torch.randn(4, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = losses_of(model, wave, x, None)
        losses, _ = pexgrad.per_example_value_and_grad(model, wave)(dict(model.named_parameters()), x)
    torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-6)


def test_a_function_that_saves_its_output():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y := x.exp())
            return y

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    def forward(s, x):
        x = x.requires_grad_()
        return torch.autograd.grad(Exp.apply(s.net(x)).sum(), x, create_graph=True)[0]

    refusal(
        forward, r"computed behind the trace: perhaps by a custom autograd.Function that saves its output"
    )


@pytest.mark.skipif(torch.__version__ < "2.12", reason="no generator in a graph")
@pytest.mark.parametrize("made", [True, False])
def test_a_generator_beside_derivatives(made):
    own = torch.Generator().manual_seed(0)

    def forward(s, x):
        generator = torch.Generator().manual_seed(1) if made else own
        return slope(s, x) + torch.empty_like(x).uniform_(generator=generator)

    model = Net(forward, net=mlp(4))
    fn, params, x = pexgrad.per_example_grad(model, wave), dict(model.named_parameters()), torch.randn(3, 4)
    if made:
        with pytest.raises(pexgrad.TraceError, match="makes a generator"):
            fn(params, x)
    else:
        assert not torch.equal(fn(params, x)["net.0.weight"], fn(params, x)["net.0.weight"])
