"""The operator over the whole table: whatever it gives without building rows is what rows give."""

from __future__ import annotations

import functools

import pytest
import torch
from cases.case import labels
from models import each, pick, select
from oracle import assert_rows_equal, copied, norms_of, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def named(model):
    return dict(model.named_parameters())


# without verification a case may be answered wrongly where it should be refused
SURE = select(without=("refused", "random", "may_refuse"))


@functools.cache
def of(case):
    """The operator of a case, and its rows by the loop."""
    model, x, y, loss = case.build()
    jacobian = pexgrad.per_example_jacobian(model, loss, verify=False)
    return jacobian(named(model), copied(x), copied(y)), rows_of(model, loss, x, y)


def flat(rows):
    """(B, P) in float64."""
    return torch.cat([r.reshape(r.shape[0], -1).double() for r in rows.values()], 1)


def direction(rows):
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(r.shape[1:], generator=generator).to(r.dtype) for k, r in rows.items()}


def assert_near(got, want, case):
    torch.testing.assert_close(got.double(), want, rtol=case.tol, atol=case.tol * want.abs().max().item())


@each(SURE)
def test_norms(case):
    jacobian, rows = of(case)
    assert_near(jacobian.norms(), flat(rows).norm(dim=1), case)


@each(SURE)
def test_norms_of_every_parameter(case):
    jacobian, rows = of(case)
    got = jacobian.norms(per_param=True)
    assert list(got) == list(rows)
    scale = flat(rows).norm()
    for name, r in rows.items():
        want = flat({name: r}).norm(dim=1)
        # a square root loses half the digits of what is zero but for rounding
        torch.testing.assert_close(
            got[name].double(), want, rtol=case.tol, atol=max(1e-7, case.tol) * scale.item()
        )


@each(SURE)
def test_weighted_sums(case):
    jacobian, rows = of(case)
    weights = torch.linspace(-1, 2, jacobian.batch)
    want = {k: torch.tensordot(weights.to(r.dtype), r, 1) for k, r in rows.items()}
    assert_rows_equal(jacobian.vjp(weights), want, case.tol)
    assert_rows_equal(jacobian.T @ weights, want, case.tol)


@each(SURE)
def test_weights_for_every_parameter(case):
    jacobian, rows = of(case)
    weights = {k: torch.linspace(-1, i + 1, jacobian.batch) for i, k in enumerate(rows)}
    want = {k: torch.tensordot(weights[k].to(r.dtype), r, 1) for k, r in rows.items()}
    assert_rows_equal(jacobian.vjp(weights), want, case.tol)


@each(SURE)
def test_directional_derivatives(case):
    jacobian, rows = of(case)
    v = direction(rows)
    want = flat(rows) @ torch.cat([d.double().reshape(-1) for d in v.values()])
    scale = flat(rows).norm()
    torch.testing.assert_close((jacobian @ v).double(), want, rtol=case.tol, atol=case.tol * scale.item())


@each(SURE)
def test_inner_products(case):
    jacobian, rows = of(case)
    assert_near(jacobian.gram(), flat(rows) @ flat(rows).T, case)


@each(SURE)
def test_moments(case):
    jacobian, rows = of(case)
    moments = jacobian.moments()
    assert_rows_equal(moments.mean, {k: r.mean(0) for k, r in rows.items()}, case.tol)
    assert_rows_equal(moments.second, {k: r.square().mean(0) for k, r in rows.items()}, case.tol)


@each(SURE)
def test_rows(case):
    jacobian, rows = of(case)
    assert_rows_equal(jacobian.rows(), rows, case.tol)


FEW = pick("""
    mlp conv2d_every_argument conv_transpose2d layer_norm embedding tied_embedding_and_head weight_norm
    time_inside_the_batch frozen_backbone class_token_and_positions sliced_weights prelu lstm mha
""")

VARIED = pick("mlp conv2d_every_argument layer_norm tied_embedding_and_head weight_norm frozen_backbone")


@each(FEW)
def test_inner_products_between_two_batches(case):
    model, x, y, loss = case.build(3)
    _, x2, y2, _ = case.build(5)
    fn = pexgrad.per_example_jacobian(model, loss)
    left, right = fn(named(model), x, y), fn(named(model), x2, y2)
    want = flat(rows_of(model, loss, x, y)) @ flat(rows_of(model, loss, x2, y2)).T
    assert_near(left.gram(right), want, case)
    assert_near(right.gram(left), want.T, case)


@pytest.mark.parametrize("b", [0, 1, 4])
@each(FEW)
def test_norms_as_a_transform(case, b):
    model, x, y, loss = case.build(b)
    rows = rows_of(model, loss, x, y)
    torch.testing.assert_close(pexgrad.per_example_grad_norm(model, loss)(named(model), x, y), norms_of(rows))


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
@each(VARIED)
def test_norms_of_every_parameter_in_chunks(case, strategy):
    model, x, y, loss = case.build(5)
    options = {"strategy": strategy, "chunk_size": 2, "per_param": True}
    got = pexgrad.per_example_grad_norm(model, loss, **options)(named(model), x, y)
    want = rows_of(model, loss, x, y)
    assert list(got) == list(want)
    for name, r in want.items():
        torch.testing.assert_close(got[name], norms_of({name: r}), rtol=1e-9, atol=1e-9)


SMOOTH = pick("mlp_with_a_loss_of_its_own conv2d_every_argument layer_norm weight_norm time_inside_the_batch")


@each(SMOOTH)
def test_norms_and_sums_can_be_differentiated(case):
    model, x, y, loss = case.build()
    x = x.requires_grad_()
    weights = torch.linspace(0.5, 2, len(x))
    wrt = [*model.parameters(), x]

    def gradient(norms, sums):
        value = norms.sin().sum() + sum(s.sin().sum() for s in sums.values())
        return torch.autograd.grad(value, wrt, allow_unused=True, materialize_grads=True)

    jacobian = pexgrad.per_example_jacobian(model, loss, create_graph=True)(named(model), x, y)
    rows = rows_of(model, loss, x, y, create_graph=True)
    norms = sum(r.flatten(1).square().sum(1) for r in rows.values()).sqrt()
    want = gradient(norms, {k: torch.tensordot(weights, r, 1) for k, r in rows.items()})
    for got, expected in zip(gradient(jacobian.norms(), jacobian.vjp(weights)), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_half_precision_is_accumulated_in_single():
    """Squares of 1e-3 vanish in float16, and sums of many of them overflow."""
    model = torch.nn.Linear(64, 64, bias=False).half()
    x = torch.full((2, 64), 1e-3).half()
    norms = pexgrad.per_example_grad_norm(model, lambda out, y: (out.float() * 300).sum(1))(named(model), x)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, (300 * 64 * x.float().norm(dim=1) / 8), rtol=5e-3, atol=0)


def test_operands_of_the_wrong_shape():
    model = torch.nn.Linear(4, 5)
    jacobian = pexgrad.per_example_jacobian(model)(named(model), torch.randn(3, 4), labels(3))
    with pytest.raises(pexgrad.PexgradError, match=r"(?s)4.*3"):
        jacobian.vjp(torch.ones(4))
    with pytest.raises(pexgrad.PexgradError, match=r"weight"):
        jacobian.jvp({"bias": torch.ones(5)})
    with pytest.raises(pexgrad.PexgradError, match=r"(?s)weight.*5, 4"):
        jacobian.jvp({"weight": torch.ones(4, 5), "bias": torch.ones(5)})
    other = torch.nn.Linear(4, 6)
    with pytest.raises(pexgrad.PexgradError, match=r"(?i)parameter"):
        jacobian.gram(pexgrad.per_example_jacobian(other)(named(other), torch.randn(2, 4), labels(2)))


# --- rows written into buffers --------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
@each(VARIED)
def test_rows_are_written_into_the_buffers_given(case, strategy, chunk_size):
    model, x, y, loss = case.build(4)
    fn = pexgrad.per_example_grad(model, loss, strategy=strategy, chunk_size=chunk_size)
    rows = fn(named(model), x, y)
    memory = {k: r.data_ptr() for k, r in rows.items()}
    _, x, y, _ = case.build(3)  # a smaller batch fits as well
    again = fn(named(model), x, y, out=rows)
    assert {k: r.data_ptr() for k, r in again.items()} == memory
    assert_rows_equal(again, rows_of(model, loss, x, y))


def test_buffers_that_do_not_fit():
    model, x, y = torch.nn.Linear(4, 5), torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    good = fn(named(model), x, y)
    with pytest.raises(pexgrad.PexgradError, match=r"bias"):
        fn(named(model), x, y, out={"weight": good["weight"]})
    with pytest.raises(pexgrad.PexgradError, match=r"(?s)weight.*2, 5, 4.*3"):
        fn(named(model), x, y, out={**good, "weight": torch.zeros(2, 5, 4)})
    with pytest.raises(pexgrad.PexgradError, match=r"float32"):
        fn(named(model), x, y, out={**good, "weight": good["weight"].float()})
