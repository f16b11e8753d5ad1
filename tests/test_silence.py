"""Ways to a wrong number that no one family of models has in common."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels, param
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def named(model):
    return dict(model.named_parameters())


def detached(rows):
    return {k: r.detach() for k, r in rows.items()}


class Clamped(torch.autograd.Function):
    """A backward that is not linear, as quantised layers have that clip gradients."""

    @staticmethod
    def forward(ctx, w):
        return w.sign()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


class Detached(Clamped):
    @staticmethod
    def backward(ctx, g):
        return 2 * g.detach()


@pytest.mark.parametrize("function", [Clamped, Detached])
def test_parameters_behind_a_backward_of_ones_own(function):
    model = Net(lambda s, x: F.linear(x, function.apply(s.w)), w=param(3, 6))
    x, y = torch.randn(5, 6), labels(5, 3)
    want = rows_of(model, F.cross_entropy, x, y)["w"]
    norms = want.flatten(1).norm(dim=1)
    jacobian = pexgrad.per_example_jacobian(model)(named(model), x, y)
    weights, v = torch.randn(5), torch.randn(3, 6)
    torch.testing.assert_close(jacobian.rows()["w"], want)
    torch.testing.assert_close(jacobian.norms(), norms)
    torch.testing.assert_close((jacobian.T @ weights)["w"], torch.tensordot(weights, want, 1))
    torch.testing.assert_close(jacobian @ {"w": v}, (want * v).sum((1, 2)))
    torch.testing.assert_close(jacobian.moments().mean["w"], want.mean(0))
    clipped = pexgrad.clipped_grad(model, max_norm=0.05)(named(model), x, y).grads["w"]
    torch.testing.assert_close(clipped, torch.tensordot(0.05 / norms.clamp(min=0.05), want, 1))


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
def test_one_tensor_under_two_names(strategy):
    t, x = torch.randn((), requires_grad=True), torch.randn(4)
    fn = pexgrad.per_example_grad(
        lambda p, x: x * (p["a"] * p["b"]), lambda o, _: o, strategy=strategy, create_graph=True
    )
    rows = fn({"a": t, "b": t}, x)
    assert_rows_equal({k: r.detach() for k, r in rows.items()}, {k: x * t.detach() for k in "ab"})
    (second,) = torch.autograd.grad(rows["a"].sum() + rows["b"].sum(), [t])
    torch.testing.assert_close(second, 2 * x.sum())


def test_a_reduction_that_there_is_not():
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), torch.randn(4, 3)
    loss = nn.MSELoss()
    fn = pexgrad.per_example_grad(model, loss)
    fn(named(model), x, y)
    loss.reduction = "avg"
    with pytest.raises(ValueError, match="avg"):
        fn(named(model), x, y)


def test_buffers_in_one_place():
    fn = pexgrad.per_example_grad(lambda p, x: x @ p["a"] * (x @ p["b"]), lambda o, _: o)
    params, x, room = {"a": torch.randn(6), "b": torch.randn(6)}, torch.randn(4, 6), torch.zeros(4, 6)
    with pytest.raises(pexgrad.InputError, match="same memory"):
        fn(params, x, out={"a": room, "b": room})
    with pytest.raises(pexgrad.InputError, match="expanded"):
        fn(params, x, out={"a": room, "b": torch.zeros(6).expand(4, 6)})
    flat = torch.zeros(4, 12)  # parts of one matrix are no such place
    rows = fn(params, x, out=pexgrad.rows.unflatten(flat, params))
    assert_rows_equal(rows, fn(params, x))


@pytest.mark.parametrize("strategy", ["multi", "naive"])
def test_a_loss_that_writes_into_the_target(strategy):
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), torch.randn(4, 3)
    before = y.clone()
    pexgrad.per_example_grad(model, lambda o, y: (o - y.mul_(3)).square().sum(), strategy=strategy)(
        named(model), x, y
    )
    assert torch.equal(y, before)


def test_global_hooks_that_come_later():
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), labels(4, 3)
    fn = pexgrad.per_example_grad(model)
    fn(named(model), x, y)
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: 2 * out)
    try:
        rows, want = fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y)
    finally:
        hook.remove()
    assert_rows_equal(rows, want)
    hook = nn.modules.module.register_module_full_backward_hook(lambda m, before, after: None)
    try:
        with pytest.raises(pexgrad.TraceError, match="backward hook"):
            fn(named(model), x, y)
    finally:
        hook.remove()
    assert_rows_equal(fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y))


# --- examples that mix, where the probe's few do not ------------------------------------------------------


def far_apart(s, x):
    """A causal convolution over time, on data whose batch lies where time should."""
    return s.conv(F.pad(x.T[None], (8, 0)))[0].T


def clipped_together(s, x):
    h = s.lin(x)
    return h * (4 / h.norm()).clamp(max=1)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Net(far_apart, conv=nn.Conv1d(6, 3, 3, dilation=4)), 9),
        (
            Net(
                lambda s, x: s.lin(torch.ones(len(x), len(x), dtype=x.dtype).tril(-4) @ x),
                lin=nn.Linear(6, 3),
            ),
            12,
        ),
        (Net(clipped_together, lin=nn.Linear(6, 3)), 64),
    ],
)
def test_examples_that_mix_only_in_a_large_batch(model, batch):
    model = model.double()
    with pytest.raises(pexgrad.MixedExamplesError, match="mix"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(batch, 6), labels(batch, 3))


def test_steps_that_rounding_may_take_either_way_do_not_mix():
    model = Net(lambda s, x: s.lin(x) + (1e6 * s.lin(x)).detach().round() % 2, lin=nn.Linear(6, 3)).float()
    x, y = torch.randn(64, 6).float(), labels(64, 3)
    pexgrad.per_example_grad(model, verify=False)(named(model), x, y)


# --- a loss that goes past the parameters -------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
def test_a_loss_that_reads_the_models_own_parameters(strategy, create_graph):
    options = {"strategy": strategy, "create_graph": create_graph}
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), labels(4, 3)

    def decayed(out, y):
        return F.cross_entropy(out, y, reduction="none") + 0.5 * model.weight.square().sum()

    with pytest.raises(pexgrad.LossError, match="reads 'weight' from the model itself"):
        pexgrad.per_example_grad(model, decayed, **options)(named(model), x, y)

    def constant(out, y):
        return F.cross_entropy(out, y, reduction="none") * model.weight.detach().norm()

    rows = pexgrad.per_example_grad(model, constant, **options)(named(model), x, y)
    assert_rows_equal(detached(rows), rows_of(model, constant, x, y))
    frozen = pexgrad.per_example_grad(model, decayed, **options)({"bias": model.bias}, x, y)
    assert_rows_equal(detached(frozen), {"bias": rows_of(model, decayed, x, y)["bias"]})


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
def test_what_a_call_is_given_may_be_made_of_the_models_own_parameters(strategy):
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), labels(4, 3)
    fn = pexgrad.per_example_grad(model, strategy=strategy, create_graph=True)
    stepped, x = {k: 0.9 * p for k, p in named(model).items()}, x * model.bias.sum()
    rows = fn(stepped, x, y)
    moved = nn.Linear(6, 3)
    moved.load_state_dict(stepped)
    assert_rows_equal(detached(rows), rows_of(moved, F.cross_entropy, x.detach(), y))


def test_a_jacobian_whose_input_has_changed():
    model, x, y = nn.Linear(6, 3), torch.randn(4, 6), labels(4, 3)
    jacobian = pexgrad.per_example_jacobian(model)(named(model), x, y)
    assert_rows_equal(jacobian.rows(), rows_of(model, F.cross_entropy, x, y))
    x.zero_()
    for use in (
        jacobian.rows,
        jacobian.norms,
        jacobian.gram,
        jacobian.keep,
        lambda: jacobian.T @ torch.ones(4),
    ):
        with pytest.raises(pexgrad.InputError, match="changed in place"):
            use()
