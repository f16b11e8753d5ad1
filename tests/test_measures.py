"""The measures against their definitions from rows, in float64."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pexgrad
from pexgrad import projection

pytestmark = pytest.mark.usefixtures("double")

TOL = {"rtol": 1e-9, "atol": 1e-12}


def named(model):
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def problem(seed=0, n=7):
    """A small CNN with a normalisation and a tied use, on n examples."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )
    return model, torch.randn(n, 1, 6, 6), torch.randint(3, (n,))


def flat_rows(model, params, x, y):
    """(B, P), by a loop."""
    rows = pexgrad.per_example_grad(model, strategy="naive")(params, x, y)
    return torch.cat([r.flatten(1) for r in rows.values()], 1)


def in_batches(x, y, size):
    return list(zip(x.split(size), y.split(size), strict=True))


# --- importance sampling --------------------------------------------------------------------------


@pytest.mark.parametrize("uniform", [0.0, 0.25, 1.0])
def test_importance_weights_undo_the_bias_exactly(uniform):
    model, x, y = problem()
    rows = flat_rows(model, named(model), x, y)
    drawn = pexgrad.importance_sample(rows.norm(dim=1), 4, uniform=uniform)
    p = drawn.probabilities
    torch.testing.assert_close(p, (1 - uniform) * rows.norm(dim=1) / rows.norm(dim=1).sum() + uniform / 7)
    torch.testing.assert_close(drawn.weights, 1 / (7 * 4 * p[drawn.index]), **TOL)
    # the expectation over all draws of one of the k terms, k times
    expected = 4 * sum(p[i] * rows[i] / (7 * 4 * p[i]) for i in range(7))
    torch.testing.assert_close(expected, rows.mean(0), **TOL)


def test_importance_draws_follow_the_probabilities():
    norms = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.0])
    drawn = pexgrad.importance_sample(norms, 80_000, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(drawn.index, minlength=5) / 80_000
    torch.testing.assert_close(share, norms / 8, rtol=0, atol=0.01)
    assert share[0] == share[4] == 0
    assert bool(drawn.weights.isfinite().all())
    again = pexgrad.importance_sample(norms, 80_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.index, drawn.index)


def test_a_weighted_draw_estimates_the_mean_gradient_with_less_variance():
    model, x, y = nn.Linear(6, 3), torch.randn(60, 6), torch.randint(3, (60,))
    x[:5] *= 20  # a few examples with large gradients
    params = named(model)
    rows = flat_rows(model, params, x, y)
    jacobian = pexgrad.per_example_jacobian(model)
    generator = torch.Generator().manual_seed(0)

    def estimate(uniform):
        drawn = pexgrad.importance_sample(rows.norm(dim=1), 10, uniform=uniform, generator=generator)
        total = jacobian(params, x[drawn.index], y[drawn.index]).T @ drawn.weights
        return torch.cat([t.flatten() for t in total.values()])

    estimates = {u: torch.stack([estimate(u) for _ in range(60)]) for u in (0.0, 1.0)}
    spread = {u: (e - rows.mean(0)).square().sum(1).mean() for u, e in estimates.items()}
    assert 2 * spread[0.0] < spread[1.0]
    for u, e in estimates.items():  # within four standard errors
        assert (e.mean(0) - rows.mean(0)).norm() < 4 * (spread[u] / 60).sqrt()


def test_all_gradients_zero_are_drawn_evenly():
    drawn = pexgrad.importance_sample(torch.zeros(4), 3)
    torch.testing.assert_close(drawn.probabilities, torch.full((4,), 0.25))


@pytest.mark.parametrize(
    ("norms", "k", "uniform", "message"),
    [
        (torch.ones(2, 2), 1, 0.0, r"norms is \(2, 2\); expected \(N,\) with N at least 1"),
        (torch.ones(0), 1, 0.0, r"N at least 1"),
        (torch.tensor([1.0, -1.0]), 1, 0.0, r"norms\[1\] is (-1|nan)"),
        (torch.tensor([1.0, float("nan")]), 1, 0.0, r"norms\[1\] is (-1|nan)"),
        (torch.ones(2), 0, 0.0, "k=0 must be a positive integer"),
        (torch.ones(2), 1, 1.5, r"uniform=1.5 must be in \[0, 1\]"),
    ],
)
def test_importance_sample_refuses(norms, k, uniform, message):
    with pytest.raises(pexgrad.InputError, match=message):
        pexgrad.importance_sample(norms, k, uniform=uniform)


# --- GraNd ----------------------------------------------------------------------------------------


def test_grand_scores_are_mean_norms_over_seeds():
    model, x, y = problem()
    seeds = [named(problem(s)[0]) for s in range(3)]
    want = torch.stack([flat_rows(model, params, x, y).norm(dim=1) for params in seeds]).mean(0)
    norm = pexgrad.per_example_grad_norm(model)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    torch.testing.assert_close(pexgrad.grand_scores(norm, seeds, loader), want, **TOL)
    assert norm.trace_count == 1


def test_grand_scores_refuse():
    model, x, y = problem()
    norm = pexgrad.per_example_grad_norm(model)
    with pytest.raises(pexgrad.InputError, match="seeds is empty"):
        pexgrad.grand_scores(norm, [], [(x, y)])
    with pytest.raises(pexgrad.InputError, match="batches is empty"):
        pexgrad.grand_scores(norm, [named(model)], [])
    with pytest.raises(pexgrad.InputError, match="without per_param"):
        pexgrad.grand_scores(pexgrad.per_example_grad_norm(model, per_param=True), [named(model)], [(x, y)])
    with pytest.raises(pexgrad.InputError, match=r"a batch of 3 parts is neither \(x, y\) nor"):
        pexgrad.grand_scores(norm, [named(model)], [(x, y, y)])


# --- TracIn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [0.1, torch.tensor(0.1), torch.tensor([0.1, 0.3]), [0.1, 0.3]])
def test_tracin_is_the_weighted_sum_of_inner_products(rates):
    model, x, y = problem(n=11)
    x, y, x_test, y_test = x[:7], y[:7], x[7:], y[7:]
    checkpoints = [named(problem(s)[0]) for s in range(2)]
    steps = torch.as_tensor(rates).expand(2).tolist()
    want = sum(
        rate * flat_rows(model, p, x, y) @ flat_rows(model, p, x_test, y_test).T
        for rate, p in zip(steps, checkpoints, strict=True)
    )
    jacobian = pexgrad.per_example_jacobian(model)
    got = pexgrad.tracin(jacobian, iter(checkpoints), iter(in_batches(x, y, 3)), (x_test, y_test), rates)
    assert got.shape == (7, 4)
    torch.testing.assert_close(got, want, **TOL)


def test_tracin_says_what_a_step_does_to_a_test_loss():
    model, x, y = problem(n=5)
    params = named(model)
    (influence,) = pexgrad.tracin(
        pexgrad.per_example_jacobian(model), [params], [(x[:1], y[:1])], (x[1:], y[1:]), rates=1e-4
    )
    grads = pexgrad.per_example_grad(model)(params, x[:1], y[:1])
    after = {k: p - 1e-4 * grads[k][0] for k, p in params.items()}
    loss = lambda p: F.cross_entropy(torch.func.functional_call(model, p, (x[1:],)), y[1:], reduction="none")  # noqa: E731
    torch.testing.assert_close(loss(params) - loss(after), influence, rtol=1e-2, atol=1e-8)


def test_tracin_refuses():
    model, x, y = problem()
    jacobian = pexgrad.per_example_jacobian(model)
    with pytest.raises(pexgrad.InputError, match="2 rates for 1 checkpoints"):
        pexgrad.tracin(jacobian, [named(model)], [(x, y)], (x, y), [0.1, 0.2])
    norms = pexgrad.per_example_grad_norm(model)
    for measure in (
        lambda: pexgrad.tracin(norms, [named(model)], [(x, y)], (x, y)),
        lambda: pexgrad.fisher_diagonal(norms, named(model), [(x, y)]),
    ):
        with pytest.raises(pexgrad.InputError, match=r"gives \(\d+,\); pass what per_example_jacobian"):
            measure()
    with pytest.raises(pexgrad.InputError, match=r"moments is a Jacobian; expected J\.moments"):
        pexgrad.noise_scale(jacobian(named(model), x, y), 3)
    with pytest.raises(pexgrad.InputError, match="checkpoints is empty"):
        pexgrad.tracin(jacobian, [], [(x, y)], (x, y))
    with pytest.raises(pexgrad.InputError, match="batches is empty"):
        pexgrad.tracin(jacobian, [named(model)], [], (x, y))


# --- moments, noise scale, Fisher -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7])
def test_moments_and_fisher_of_a_data_set_do_not_depend_on_its_batches(size):
    model, x, y = problem()
    params = named(model)
    rows = pexgrad.per_example_grad(model, strategy="naive")(params, x, y)
    jacobian = pexgrad.per_example_jacobian(model)
    moments, examples = pexgrad.dataset_moments(jacobian, params, [*in_batches(x, y, size), (x[:0], y[:0])])
    assert examples == 7
    fisher = pexgrad.fisher_diagonal(jacobian, params, in_batches(x, y, size))
    for k, r in rows.items():
        torch.testing.assert_close(moments.mean[k], r.mean(0), **TOL)
        torch.testing.assert_close(moments.second[k], r.square().mean(0), **TOL)
        torch.testing.assert_close(fisher[k], r.square().mean(0), **TOL)


def test_noise_scale_is_the_trace_of_the_covariance_over_the_squared_mean():
    model, x, y = problem()
    params = named(model)
    rows = flat_rows(model, params, x, y)
    J = pexgrad.per_example_jacobian(model)(params, x, y)
    got = pexgrad.noise_scale(J.moments(), J.batch)
    trace = torch.cov(rows.T).trace().item()  # unbiased: over N - 1
    signal = rows.mean(0).square().sum().item() - trace / 7
    assert got.noise == pytest.approx(trace, rel=1e-9)
    assert got.signal == pytest.approx(signal, rel=1e-9)
    assert got.scale == pytest.approx(trace / signal if signal > 0 else float("inf"), rel=1e-9)


def test_noise_scale_estimates_are_unbiased():
    """Over every pair of a population of five, the estimates average to those of the population itself."""
    g = torch.randn(5, 3) + 1
    pairs = [(i, j) for i in range(5) for j in range(5)]  # two independent draws
    parts = []
    for pair in pairs:
        two = g[list(pair)]
        moments = pexgrad.Moments({"w": two.mean(0)}, {"w": two.square().mean(0)})
        parts.append(pexgrad.noise_scale(moments, 2))
    mean = g.mean(0)
    assert sum(p.noise for p in parts) / 25 == pytest.approx((g - mean).square().sum(1).mean().item())
    assert sum(p.signal for p in parts) / 25 == pytest.approx(mean.square().sum().item())


def test_noise_scale_without_signal_is_infinite():
    moments = pexgrad.Moments({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    assert pexgrad.noise_scale(moments, 4).scale == float("inf")


def test_moments_refuse():
    model, x, y = problem()
    jacobian = pexgrad.per_example_jacobian(model)
    with pytest.raises(pexgrad.InputError, match="batches holds no example"):
        pexgrad.dataset_moments(jacobian, named(model), [(x[:0], y[:0])])
    J = jacobian(named(model), x[:1], y[:1])
    with pytest.raises(pexgrad.InputError, match="examples=1: the spread"):
        pexgrad.noise_scale(J.moments(), J.batch)


def test_half_precision_moments_are_float32():
    model, x, y = problem()
    model = model.bfloat16()
    jacobian = pexgrad.per_example_jacobian(model, verify=False)
    moments, _ = pexgrad.dataset_moments(jacobian, named(model), [(x.bfloat16(), y)])
    assert {t.dtype for t in (*moments.mean.values(), *moments.second.values())} == {torch.float32}


# --- projection -----------------------------------------------------------------------------------


def matrix(rows, k, seed):
    """R (P, k), read off the projection itself by projecting unit rows."""
    names, total = list(rows), sum(r[0].numel() for r in rows.values())
    units = torch.eye(total).split([r[0].numel() for r in rows.values()], 1)
    unit_rows = {n: u.reshape(total, *rows[n].shape[1:]) for n, u in zip(names, units, strict=True)}
    return pexgrad.project(pexgrad.Jacobian.of_rows(torch.zeros(total), unit_rows), k, seed=seed)


def test_a_projection_is_a_product_with_one_matrix_of_signs():
    model, x, y = problem()
    params = named(model)
    rows = pexgrad.per_example_grad(model, strategy="naive")(params, x, y)
    R = matrix(rows, 5, 3)
    torch.testing.assert_close(R.abs(), torch.full_like(R, 5**-0.5))
    assert abs(R.mean()) < 0.05
    J = pexgrad.per_example_jacobian(model)(params, x, y)
    torch.testing.assert_close(pexgrad.project(J, 5, seed=3), flat_rows(model, params, x, y) @ R, **TOL)
    assert not torch.allclose(pexgrad.project(J, 5, seed=4), pexgrad.project(J, 5, seed=3))


@pytest.mark.parametrize("rows_bytes", [1, 3000, 1 << 28])
@pytest.mark.parametrize("size", [2, 7])
def test_a_projection_does_not_depend_on_how_the_work_is_cut(rows_bytes, size, monkeypatch):
    model, x, y = problem()
    params = named(model)
    jacobian = pexgrad.per_example_jacobian(model)
    want = pexgrad.project(jacobian(params, x, y), 6)
    monkeypatch.setattr(projection, "ROWS_BYTES", rows_bytes)
    got = torch.cat([pexgrad.project(jacobian(params, a, b), 6) for a, b in in_batches(x, y, size)])
    torch.testing.assert_close(got, want, **TOL)


def test_blocks_of_one_parameter_are_independent(monkeypatch):
    monkeypatch.setattr(projection, "_BLOCK", 64)
    rows = {"w": torch.randn(2, 40), "v": torch.randn(2, 16)}
    R = matrix(rows, 8, 0)
    blocks = [*R[:40].split(8), *R[40:].split(8)]
    assert not any(torch.equal(a, b) for i, a in enumerate(blocks) for b in blocks[:i])


def test_projections_keep_inner_products():
    model, x, y = problem(n=20)
    J = pexgrad.per_example_jacobian(model)(named(model), x, y)
    phi, norms = pexgrad.project(J, 4096), J.norms()
    error = (phi @ phi.T - J.gram()) / (norms[:, None] * norms[None])
    assert error.abs().max() < 6 / 4096**0.5


def test_projection_of_a_number_and_of_an_empty_batch():
    params = {"scale": torch.tensor(2.0), "shift": torch.zeros(3)}
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    jacobian = pexgrad.per_example_jacobian(lambda p, x: x * p["scale"] + p["shift"])
    J = jacobian(params, x, y)
    flat = torch.cat([r.reshape(4, -1) for r in J.rows().values()], 1)
    R = matrix({"scale": torch.zeros(4, 1), "shift": torch.zeros(4, 3)}, 5, 0)
    torch.testing.assert_close(pexgrad.project(J, 5), flat @ R, **TOL)
    assert pexgrad.project(jacobian(params, x[:0], y[:0]), 5).shape == (0, 5)


def test_projection_of_tied_and_derived_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, ids):
            return F.linear(self.mix(self.table(ids)).mean(1), self.table.weight)

    model, ids, y = Tied(), torch.randint(9, (5, 6)), torch.randint(9, (5,))
    params = named(model)
    rows = pexgrad.per_example_grad(model, strategy="naive")(params, ids, y)
    J = pexgrad.per_example_jacobian(model)(params, ids, y)
    want = torch.cat([r.flatten(1) for r in rows.values()], 1) @ matrix(rows, 4, 0)
    torch.testing.assert_close(pexgrad.project(J, 4), want, **TOL)


def test_complex_rows_project_as_pairs_of_real_numbers():
    g = torch.randn(50, 3, dtype=torch.complex128)
    J = pexgrad.Jacobian.of_rows(torch.zeros(50), {"w": g})
    phi = pexgrad.project(J, 4096)
    assert phi.dtype == torch.float64
    torch.testing.assert_close(phi.square().sum(1), g.abs().square().sum(1), rtol=0.3, atol=0)


def test_no_examples_project_to_nothing():
    model, x, y = problem()
    assert pexgrad.project(pexgrad.per_example_jacobian(model)(named(model), x[:0], y[:0]), 3).shape == (0, 3)
    with pytest.raises(pexgrad.InputError, match="k=0 must be a positive integer"):
        pexgrad.project(pexgrad.per_example_jacobian(model)(named(model), x, y), 0)


# --- streaming ------------------------------------------------------------------------------------


def test_streams_hold_one_batch_at_a_time():
    """The loop, its caller and the generator each still have a name for one batch; older ones are gone."""
    model, x, y = problem()
    params, alive, most = named(model), weakref.WeakSet(), 0

    def stream(n):
        nonlocal most
        for _ in range(n):
            batch = torch.randn(4, 1, 6, 6)
            alive.add(batch)
            most = max(most, len(alive))
            yield batch, torch.zeros(4, dtype=torch.long)

    jacobian, norm = pexgrad.per_example_jacobian(model), pexgrad.per_example_grad_norm(model)
    pexgrad.dataset_moments(jacobian, params, stream(20))
    pexgrad.fisher_diagonal(jacobian, params, stream(20))
    pexgrad.grand_scores(norm, [params], stream(20))
    pexgrad.tracin(jacobian, [params], stream(20), (x, y))
    assert most <= 3


def test_loaders_of_single_parts_serve_every_measure():
    """`TensorDataset(x)` gives tuples of one, and some loaders a tensor alone: both are x without y, as for `over_loader`."""
    model, x, _ = problem()
    jacobian = pexgrad.per_example_jacobian(model, lambda out, _: out.square().sum(1))
    params = named(model)
    want = jacobian(params, x).moments().mean
    for loader in ([(x[:3],), (x[3:],)], [x[:3], x[3:]]):
        moments, examples = pexgrad.dataset_moments(jacobian, params, loader)
        assert examples == len(x)
        torch.testing.assert_close(moments.mean, want)
