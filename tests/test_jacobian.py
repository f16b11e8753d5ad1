"""The operator over the whole table: whatever it gives without building rows is what rows give."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels, wave
from models import each, pick, select
from oracle import assert_rows_equal, copied, norms_of, rows_of, rows_of_function

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
    squares = {k: (r.float() if r.itemsize < 4 else r).square().mean(0) for k, r in rows.items()}
    assert_rows_equal(moments.second, squares, case.tol)


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


# not weight_norm: torch's own second derivative of it is wrong, test_double_backward.py has numerical ones
SMOOTH = pick("mlp_with_a_loss_of_its_own conv2d_every_argument layer_norm time_inside_the_batch")


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


# --- memory layouts, complex numbers, two functions, no examples ---------------------------------------


def assert_operator_is_of_rows(fn, f, params, loss, x, others):
    """Everything that the operator gives against rows by the loop; inner products with other batches too."""
    jacobian, rows = fn(params, x), rows_of_function(f, params, loss, x, None)
    flat = {k: as_real(r) for k, r in rows.items()}
    whole = torch.cat(list(flat.values()), 1)
    near = {"rtol": 1e-9, "atol": 1e-9 * whole.abs().max().item()}
    torch.testing.assert_close(torch.cat([as_real(r) for r in jacobian.rows().values()], 1), whole, **near)
    torch.testing.assert_close(jacobian.norms(), whole.norm(dim=1), **near)
    weights = torch.linspace(-1, 2, len(whole))
    sums = jacobian.T @ weights
    torch.testing.assert_close(
        torch.cat([as_real(s[None]) for s in sums.values()], 1)[0], weights @ whole, **near
    )
    v = {k: torch.randn_like(p) for k, p in params.items()}
    along = torch.cat([as_real(d[None]) for d in v.values()], 1)[0]
    torch.testing.assert_close(jacobian @ v, whole @ along, **near)
    second = jacobian.moments().second
    for k, r in rows.items():
        torch.testing.assert_close(second[k], r.abs().square().mean(0), **near)
    near["atol"] *= whole.abs().max().item()
    for z in (x, *others):
        theirs = torch.cat([as_real(r) for r in rows_of_function(f, params, loss, z, None).values()], 1)
        torch.testing.assert_close(jacobian.gram(fn(params, z)), whole @ theirs.T, **near)


def as_real(rows):
    return (torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows).flatten(1)


def tied_both_ways(p, x):
    return torch.tanh(x @ p["w"].T + p["b"]) @ p["w"]


BUFFER = torch.randn(60, dtype=torch.float64)
LAYOUTS = {
    "contiguous": lambda: {"w": BUFFER[:12].view(4, 3).clone(), "b": BUFFER[:4].clone()},
    "in_one_buffer": lambda: {"w": BUFFER[5:17].view(4, 3), "b": BUFFER[17:21]},
    "transposed": lambda: {"w": BUFFER[:12].view(3, 4).T, "b": BUFFER[:8:2]},
    "expanded": lambda: {"w": BUFFER[:4, None].expand(4, 3), "b": BUFFER[:1].expand(4)},
    "with_gaps": lambda: {"w": BUFFER.view(10, 6)[2:6, :3], "b": BUFFER[::7][:4]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_any_memory_layout(layout):
    fn = pexgrad.per_example_jacobian(tied_both_ways, wave)
    x, z = torch.randn(5, 6, 3), torch.randn(2, 6, 3)
    assert_operator_is_of_rows(fn, tied_both_ways, LAYOUTS[layout](), wave, x, [z])


def test_parameters_that_are_parts_of_one_buffer_need_no_rows():
    explained = pexgrad.per_example_jacobian(tied_both_ways, wave).explain(
        LAYOUTS["in_one_buffer"](), torch.randn(5, 6, 3)
    )
    assert not any("derived" in line.flags for line in explained.lines)


def test_inner_products_of_parameters_laid_out_in_two_ways():
    """The same place in memory is another element there."""

    def f(p, x):
        return x[:, 0] * p["w"][0, 1] + x[:, 1] * p["w"][1, 2]

    fn, w = pexgrad.per_example_jacobian(f, lambda out, y: out.sin()), torch.randn(2, 3)
    left = fn({"w": w}, torch.randn(4, 2))
    right = fn({"w": w.T.contiguous().T}, torch.randn(5, 2))
    want = flat(left.rows()) @ flat(right.rows()).T
    torch.testing.assert_close(left.gram(right), want)
    torch.testing.assert_close(right.gram(left), want.T)


def test_inner_products_of_two_functions_of_the_same_parameters():
    """One connects two parameters, the other does not."""
    params = {"a": torch.randn(3, 2), "b": torch.randn(3, 2)}
    product = pexgrad.per_example_jacobian(lambda p, x: x @ (p["a"] * p["b"]), wave)
    apart = pexgrad.per_example_jacobian(lambda p, x: x @ p["a"] + (x @ p["b"]).sin(), wave)
    left, right = product(params, torch.randn(4, 3)), apart(params, torch.randn(5, 3))
    want = flat(left.rows()) @ flat(right.rows()).T
    torch.testing.assert_close(left.gram(right), want)
    torch.testing.assert_close(right.gram(left), want.T)


COMPLEX = {
    "linear": lambda p, x: (
        x @ p["w"].T.conj() + x[..., :2] @ p["w"][:2, :2] @ torch.ones(2, 5, dtype=x.dtype)
    ),
    "derived": lambda p, x: x @ (p["w"] * p["w"].conj().roll(1) + p["w"] ** 2).T,
    "conv": lambda p, x: torch.nn.functional.conv1d(x, p["w"][:, :, None].expand(5, 3, 2), padding=1),
}


@pytest.mark.parametrize("kind", COMPLEX)
def test_complex_parameters(kind):
    def loss(out, y):
        return (out.abs().square() + out.real * out.imag).flatten(1).sum(1)

    params, f = {"w": torch.randn(5, 3, dtype=torch.complex128)}, COMPLEX[kind]
    x, z = torch.randn(4, 3, 3, dtype=torch.complex128), torch.randn(2, 3, 3, dtype=torch.complex128)
    assert_operator_is_of_rows(pexgrad.per_example_jacobian(f, loss), f, params, loss, x, [z])


def test_the_operator_of_no_examples():
    fn, params = pexgrad.per_example_jacobian(tied_both_ways, wave), LAYOUTS["contiguous"]()
    none, some = fn(params, torch.randn(0, 6, 3)), fn(params, torch.randn(2, 6, 3))
    assert none.norms().shape == (none @ params).shape == (0,)
    assert {k: n.shape for k, n in none.norms(per_param=True).items()} == {"w": (0,), "b": (0,)}
    assert none.gram().shape == (0, 0) and none.gram(some).shape == (0, 2) and some.gram(none).shape == (2, 0)
    moments = none.moments()
    for found in (none.T @ torch.zeros(0), moments.mean, moments.second):
        assert {k: v.shape for k, v in found.items()} == {k: p.shape for k, p in params.items()}
        assert not any(v.any() for v in found.values())


# where each bound is read
BOUNDS = {
    "PIECE_BYTES": [pexgrad.factors._base],
    "BLOCK_BYTES": [pexgrad.factors._base, pexgrad.operator.component],
}


@pytest.mark.parametrize("bound", BOUNDS)
@each(pick("mlp tied_embedding_and_head weight_norm sliced_weights lstm class_token_and_positions"))
def test_nothing_depends_on_how_the_work_is_cut(case, bound, monkeypatch):
    for module in BOUNDS[bound]:
        monkeypatch.setattr(module, bound, 1)
    model, x, y, loss = case.build()
    rows = flat(rows_of(model, loss, x, y))
    jacobian = pexgrad.per_example_jacobian(model, loss)(named(model), copied(x), copied(y))
    assert_near(jacobian.norms(), rows.norm(dim=1), case)
    assert_near(jacobian.gram(), rows @ rows.T, case)
    assert_near(
        flat({k: s[None] for k, s in jacobian.moments().second.items()})[0], rows.square().mean(0), case
    )


def test_an_example_that_is_not_finite_leaves_the_others_alone():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 5))
    x = torch.randn(4, 3, 4)
    x[1] = torch.inf
    jacobian = pexgrad.per_example_jacobian(model, wave)(named(model), x)
    rows, kept = rows_of(model, wave, x, None), [0, 2, 3]
    assert not flat(rows)[1].isfinite().any()
    want = flat(rows)[kept]
    torch.testing.assert_close(flat(jacobian.rows())[kept], want)
    torch.testing.assert_close(jacobian.norms()[kept], want.norm(dim=1))
    torch.testing.assert_close(jacobian.gram()[kept][:, kept], want @ want.T)


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
    jacobian = pexgrad.per_example_jacobian(model)(named(model), x, y)
    for out in ([1], {}, {**good, "bias": torch.zeros(2, 5)}, {**good, "bias": good["bias"].float()}):
        with pytest.raises(pexgrad.InputError, match=r"out\['bias'\] is|out is a list|out has no buffer for"):
            jacobian.rows(out)
    longer = {"weight": torch.full((5, 5, 4), 7.0), "bias": torch.full((4, 5), 7.0)}
    longer = {k: t.to(good[k].dtype) for k, t in longer.items()}
    torch.testing.assert_close(jacobian.rows(longer), good)
    assert all(bool((t[3:] == 7).all()) for t in longer.values())


def test_nested_parameters():
    def f(p, x):
        return torch.tanh(x @ p["a"]["w"]) @ p["b"]

    params, x, y = {"a": {"w": torch.randn(4, 3)}, "b": torch.randn(3, 2)}, torch.randn(5, 4), labels(5, 2)
    fn = pexgrad.per_example_jacobian(f)
    jacobian, rows = fn(params, x, y), pexgrad.per_example_grad(f)(params, x, y)
    torch.testing.assert_close(jacobian.rows(), rows)
    torch.testing.assert_close(jacobian @ params, pexgrad.rows.dot(rows, params))
    torch.testing.assert_close((jacobian.T @ torch.ones(5))["a"]["w"], rows["a"]["w"].sum(0))
    torch.testing.assert_close(jacobian.moments().mean, pexgrad.rows.mean(rows))
    assert jacobian.norms(per_param=True)["a"]["w"].shape == (5,)
    fisher = pexgrad.fisher_diagonal(fn, params, [(x, y)])
    torch.testing.assert_close(fisher["a"]["w"], rows["a"]["w"].square().mean(0))
    room = {"a": {"w": torch.zeros(5, 4, 3)}, "b": torch.zeros(5, 3, 2)}
    torch.testing.assert_close(jacobian.rows(out=room), rows)


WITHOUT_DERIVATIVES_OF_THEIR_BACKWARD = {
    "none at zero": lambda w: w.logcumsumexp(0),
    "none": F.hardsigmoid,
    "none, and many results": lambda w: F.embedding_bag(torch.tensor([[0, 1]] * 4), w[:, None], mode="max")[
        :, 0
    ],
}


@pytest.mark.parametrize("name", WITHOUT_DERIVATIVES_OF_THEIR_BACKWARD)
def test_directions_through_what_has_no_second_derivative(name):
    derive = WITHOUT_DERIVATIVES_OF_THEIR_BACKWARD[name]
    model = Net(lambda s, x: torch.tanh(x * derive(s.w)), w=nn.Parameter(torch.randn(4)))
    x, v = torch.randn(5, 4), torch.randn(4)
    jacobian = pexgrad.per_example_jacobian(model, wave)(dict(model.named_parameters()), x)
    torch.testing.assert_close(jacobian @ {"w": v}, rows_of(model, wave, x, None)["w"] @ v)


def test_weights_drawn_anew_for_each_example():
    """As a Bayesian layer draws them: one operation puts the parameters of both in shape."""

    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.spread = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x * torch.distributions.Normal(self.mean, self.spread.exp()).rsample((x.shape[0],))

    model, x = Drawn(), torch.randn(5, 4)
    jacobian = pexgrad.per_example_jacobian(model, lambda o, y: o.square().sum(1))(named(model), x)
    rows, weights = jacobian.rows(), torch.randn(5)
    for k, total in jacobian.vjp(weights).items():
        torch.testing.assert_close(total, torch.tensordot(weights, rows[k], 1))
    for k, mean in jacobian.moments().mean.items():
        torch.testing.assert_close(mean, rows[k].mean(0))
    torch.testing.assert_close(jacobian.norms(), torch.cat([*rows.values()], 1).norm(dim=1))


def test_an_operator_is_not_copied():
    model = nn.Linear(3, 2)
    J = pexgrad.per_example_jacobian(model)(dict(model.named_parameters()), torch.randn(4, 3), labels(4, 2))
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(pexgrad.InputError, match="neither be copied nor pickled; keep its rows"):
            make(J)


def test_inner_products_of_two_precisions():
    x, y = torch.randn(4, 3), labels(4, 2)
    one, other = (
        pexgrad.per_example_jacobian(m)(dict(m.named_parameters()), x.to(m.weight.dtype), y)
        for m in (nn.Linear(3, 2).float(), nn.Linear(3, 2).double())
    )
    with pytest.raises(
        pexgrad.InputError, match=r"\(2, 3\) of torch.float32 here and \(2, 3\) of torch.float64 there"
    ):
        one.gram(other)
