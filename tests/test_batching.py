"""Ensembles, chunks and loaders, and the small functions of rows."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn as nn
from models import each, select
from oracle import assert_rows_equal, copied
from test_lower import TRANSFORMS, assert_same, mlp, named
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

import pexgrad
from pexgrad import rows as R

pytestmark = pytest.mark.usefixtures("double")


def models(n=3):
    return [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(n)]


# --- ensembles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["crb", "naive"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_ensemble_is_its_members(name, strategy):
    _, _, x, y = mlp()
    members = models()
    fn = TRANSFORMS[name](members[0], strategy=strategy)
    got = pexgrad.ensemble(fn)(pexgrad.stack_params(members), x, y)
    want = [fn(named(m), x, y) for m in members]
    assert_same(got, tree_map(lambda *r: torch.stack(r), *want))


# graphs of whole calls take their time: every third case, or all of them by request
GRAPHS = select(without=("refused", "random", "may_refuse", "slow"))[:: 1 if "GRAPHS" in os.environ else 3]


@each(GRAPHS)
def test_members_together_over_the_table(case):
    model, x, y, loss = case.build()
    fn = pexgrad.clipped_grad(model, loss, max_norm=0.3, verify=False)
    stacked = {k: torch.stack([p.detach(), p.detach() * 1.1]) for k, p in named(model).items()}
    try:
        got = pexgrad.ensemble(fn, how="together")(stacked, copied(x), copied(y))
    except pexgrad.PexgradError as error:
        pytest.skip(f"no flat graph: {str(error).splitlines()[0]}")
    want = pexgrad.ensemble(fn, how="one by one")(stacked, copied(x), copied(y))
    # half precision rounds at every step, and the sums are taken in another order
    assert_same(got, want, 1e-9 if all(p.dtype == torch.float64 for p in stacked.values()) else 5e-2)


def filled(p, x):
    return (x @ p["w"]).masked_fill(x[:, :3] > 0, p["s"])


def copied_to(p, x):
    table = x.new_zeros(4, 3)
    table.copy_(p["s"])
    return x @ (table + p["w"])


# with as many columns as members, among which a number of each member must not be spread
NUMBERS = {
    "added to a product": lambda p, x: x @ torch.addmm(p["s"], p["w"][:, :2], p["w"][:2]),
    "added to a product with a factor": lambda p, x: x @ torch.addmm(p["s"], p["w"], p["w"][:3], beta=0.5),
    "filled in": filled,
    "copied": copied_to,
    "place of the largest": lambda p, x: x @ (p["w"] * p["s"]) + (torch.arange(12) == p["w"].argmax())[:3],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_members_together_with_a_number_of_each(name):
    _, _, x, y = mlp()
    stacked = {"w": torch.randn(3, 4, 3), "s": torch.randn(3)}
    fn = pexgrad.per_example_grad(NUMBERS[name])
    got = pexgrad.ensemble(fn, how="together")(stacked, x, y)
    assert_same(got, pexgrad.ensemble(fn, how="one by one")(stacked, x, y))


def test_members_with_numbers_of_their_own_are_called_one_by_one():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
    _, _, x, y = mlp()
    fn, stacked = pexgrad.per_example_grad(model), pexgrad.stack_params([model, model])
    rows = pexgrad.ensemble(fn)(stacked, x, y)["2.weight"]
    assert not torch.equal(rows[0], rows[1])
    with pytest.raises(pexgrad.TraceError, match="draws random numbers of its own"):
        pexgrad.ensemble(fn, how="together")(stacked, x, y)
    with pytest.raises(pexgrad.InputError, match="how='vmap' is not one of"):
        pexgrad.ensemble(fn, how="vmap")


def test_an_ensemble_agrees_with_vmap():
    model, _, x, y = mlp()
    fn, stacked = pexgrad.per_example_grad(model), pexgrad.stack_params(models())
    assert_same(
        pexgrad.ensemble(fn)(stacked, x, y), torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y)
    )


def test_an_ensemble_with_data_of_its_own():
    model, _, x, y = mlp()
    fn, members = pexgrad.per_example_grad_norm(model), models(2)
    got = pexgrad.ensemble(fn, stacked_data=True)(
        pexgrad.stack_params(members), torch.stack([x, -x]), torch.stack([y, y.flip(0)])
    )
    assert_same(got, torch.stack([fn(named(members[0]), x, y), fn(named(members[1]), -x, y.flip(0))]))


def test_an_ensemble_of_a_function_of_nested_parameters():
    _, _, x, y = mlp()
    fn = pexgrad.per_example_grad(lambda p, x: torch.tanh(x @ p["a"]["w"]))
    w = torch.randn(2, 4, 3)
    got = pexgrad.ensemble(fn)({"a": {"w": w}}, x, y)
    assert_same(got, {"a": {"w": torch.stack([fn({"a": {"w": v}}, x, y)["a"]["w"] for v in w])}})


def test_what_cannot_be_stacked():
    with pytest.raises(pexgrad.InputError, match="at least one model"):
        pexgrad.stack_params([])
    with pytest.raises(pexgrad.InputError, match="model 1 has other parameters"):
        pexgrad.stack_params([nn.Linear(2, 3), nn.Linear(3, 3)])
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    second.running_mean.add_(1)
    with pytest.raises(pexgrad.InputError, match="buffer 'running_mean' of model 1"):
        pexgrad.stack_params([first, second])
    model, params, x, y = mlp()
    with pytest.raises(pexgrad.InputError, match="where one number is needed"):
        pexgrad.ensemble(pexgrad.per_example_grad(model))(params, x, y)


# --- chunks and loaders -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 9])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_chunks_are_the_whole(name, size):
    model, params, x, y = mlp()
    fn = TRANSFORMS[name](model)
    assert_same(pexgrad.chunked(fn, size)(params, x, y), fn(params, x, y))


def test_an_empty_batch_in_chunks():
    model, params, x, y = mlp()
    assert pexgrad.chunked(pexgrad.per_example_grad(model), 2)(params, x[:0], y[:0])["0.weight"].shape == (
        0,
        6,
        4,
    )


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_chunks_of_no_size(size):
    with pytest.raises(pexgrad.InputError, match="must be a positive integer"):
        pexgrad.chunked(lambda params, x, y: x, size)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_loader_is_one_batch(name):
    model, params, x, y = mlp()
    fn = TRANSFORMS[name](model)
    assert_same(
        pexgrad.over_loader(fn, DataLoader(TensorDataset(x, y), batch_size=3))(params), fn(params, x, y)
    )


def test_a_loader_of_other_batches():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    batches = [{"image": x[:2], "label": y[:2]}, {"image": x[2:], "label": y[2:]}]
    got = pexgrad.over_loader(
        fn, batches, unpack=lambda b: (b["image"], b["label"]), reduce=lambda rows: R.norms(rows)
    )(params)
    assert_same(got, R.norms(fn(params, x, y)))
    with pytest.raises(pexgrad.InputError, match="neither"):
        pexgrad.over_loader(fn, [(x, x, y)])(params)
    with pytest.raises(pexgrad.InputError, match="no batch"):
        pexgrad.over_loader(fn, [])(params)


def test_a_loader_without_targets():
    model, params, x, _ = mlp()
    fn = pexgrad.per_example_grad(model, lambda out, _: out.square().sum(1))
    for batches in ([x[:3], x[3:]], [(x[:3],), (x[3:],)]):
        assert_same(pexgrad.over_loader(fn, batches)(params), fn(params, x))


# --- rows -----------------------------------------------------------------------------------------------


@pytest.fixture
def rows():
    return {"w": torch.randn(5, 3, 4), "b": torch.randn(5, 3), "s": torch.randn(5), "none": torch.randn(5, 0)}


def matrix(rows):
    return torch.cat([r.reshape(5, -1) for r in rows.values()], 1)


def test_flat_and_back(rows):
    flat = R.flatten(rows)
    assert torch.equal(flat, matrix(rows))
    params = {k: r[0] for k, r in rows.items()}
    back = R.unflatten(flat, params)
    assert_rows_equal(back, rows)
    assert all(r.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for r in back.values())
    assert torch.equal(R.flatten(params, batch_dims=0), flat[0])
    assert_same(R.unflatten(flat[0], params), params)


def test_one_entry_is_not_copied(rows):
    assert R.flatten({"w": rows["w"]}).data_ptr() == rows["w"].data_ptr()


def test_norms_dots_and_sums(rows):
    flat, w = matrix(rows), torch.randn(5)
    torch.testing.assert_close(R.norms(rows), flat.norm(dim=1))
    assert_same(R.norms(rows, per_param=True), {k: r.reshape(5, -1).norm(dim=1) for k, r in rows.items()})
    other = {k: torch.randn_like(r) for k, r in rows.items()}
    torch.testing.assert_close(R.dot(rows, other), (flat * matrix(other)).sum(1))
    direction = {k: r[0] for k, r in other.items()}
    torch.testing.assert_close(R.dot(rows, direction), flat @ matrix(other)[0])
    assert_same(R.mean(rows), {k: r.mean(0) for k, r in rows.items()})
    assert_same(R.mean(rows, w), {k: torch.tensordot(w, r, 1) / 5 for k, r in rows.items()})


def test_clipped_rows(rows):
    bound = R.norms(rows).median().item()
    clipped = R.clip(rows, bound)
    assert (R.norms(clipped) <= bound * (1 + 1e-12)).all()
    small = R.norms(rows) <= bound
    assert torch.equal(clipped["w"][small], rows["w"][small])


def test_clipped_rows_sum_to_the_clipped_sum():
    model, params, x, y = mlp()
    summed = {k: r.sum(0) for k, r in R.clip(pexgrad.per_example_grad(model)(params, x, y), 0.3).items()}
    assert_same(summed, pexgrad.clipped_grad(model, max_norm=0.3)(params, x, y).grads)


def test_half_precision_norms_are_accumulated_in_float32():
    norms = R.norms({"w": torch.full((2, 70000), 1.0, dtype=torch.float16)})
    assert norms.dtype == torch.float32 and norms.allclose(torch.tensor(70000.0).sqrt().float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_rows_are_not_rounded(dtype):
    rows = {"w": torch.tensor([[3e4, 4e4], [0.3, 0.4]], dtype=dtype)}
    wide = {"w": rows["w"].float()}
    for bound in (1e-4, 0.3):  # 1e-4 / 5e4 is nothing in float16
        assert torch.equal(R.clip(rows, bound)["w"], R.clip(wide, bound)["w"].to(dtype))
    weights = torch.tensor([1e-8, 1.0]).float()
    assert torch.equal(R.mean(rows, weights)["w"], (wide["w"] * weights[:, None]).to(dtype).sum(0) / 2)


def test_products_of_no_rows():
    rows = {"w": torch.zeros(0, 3, 4), "s": torch.zeros(0)}
    assert R.dot(rows, {"w": torch.zeros(3, 4), "s": torch.zeros(())}).shape == (0,)
    assert R.dot(rows, rows).shape == (0,)


def test_gradients_for_an_optimiser():
    model, params, x, y = mlp()
    grads = pexgrad.clipped_grad(model, max_norm=0.3)(params, x, y).grads
    R.to_module_grads(model, grads)
    assert_same({k: p.grad for k, p in model.named_parameters()}, grads)
    R.to_module_grads(model, {"0.bias": grads["0.bias"]}, accumulate=True)
    assert_same(model[0].bias.grad, 2 * grads["0.bias"])
    assert_same(model[2].bias.grad, grads["2.bias"])
    with pytest.raises(pexgrad.InputError, match="no parameter 'x'"):
        R.to_module_grads(model, {"0.bias": grads["0.bias"] * 5, "x": grads["0.bias"]})
    assert_same(model[0].bias.grad, 2 * grads["0.bias"])


def test_rows_that_do_not_fit(rows):
    with pytest.raises(pexgrad.InputError, match="no rows"):
        R.flatten({})
    with pytest.raises(pexgrad.InputError, match="dimensions of the entries differ"):
        R.flatten({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)})
    with pytest.raises(pexgrad.InputError, match="expected"):
        R.unflatten(torch.zeros(5, 9), {"a": torch.zeros(2, 3)})
    with pytest.raises(pexgrad.InputError, match="'w' has rows"):
        R.dot(rows, {"w": torch.zeros(2)})
    with pytest.raises(pexgrad.InputError, match="positive, finite"):
        R.clip(rows, 0)
    with pytest.raises(pexgrad.InputError, match="empty"):
        R.norms({})


def test_members_together_are_not_differentiated():
    model, _, x, y = mlp()
    fn = pexgrad.per_example_grad(model, create_graph=True)
    stacked = pexgrad.stack_params(models())
    with pytest.raises(pexgrad.InputError, match="create_graph"):
        pexgrad.ensemble(fn, how="together")(stacked, x, y)
    assert pexgrad.ensemble(fn)({k: p.requires_grad_() for k, p in stacked.items()}, x, y)[
        "0.weight"
    ].requires_grad


@pytest.mark.parametrize("how", ["auto", "one by one", "together"])
def test_data_of_more_members_than_there_are(how):
    model, _, x, y = mlp()
    fn = pexgrad.ensemble(pexgrad.per_example_grad(model), stacked_data=True, how=how)
    with pytest.raises(pexgrad.InputError, match="3 members on dimension 0"):
        fn(pexgrad.stack_params(models(3)), torch.stack([x] * 5), torch.stack([y] * 5))


def test_nested_rows():
    rows = {"a": {"w": torch.randn(5, 2, 3)}, "b": torch.randn(5, 4)}
    params = {"a": {"w": torch.randn(2, 3)}, "b": torch.randn(4)}
    flat = {"a.w": rows["a"]["w"], "b": rows["b"]}
    torch.testing.assert_close(R.flatten(rows), R.flatten(flat))
    torch.testing.assert_close(R.unflatten(R.flatten(rows), params), rows)
    torch.testing.assert_close(R.norms(rows), R.norms(flat))
    torch.testing.assert_close(R.dot(rows, params), R.dot(flat, {"a.w": params["a"]["w"], "b": params["b"]}))
    assert R.norms(rows, per_param=True)["a"]["w"].shape == (5,)
    torch.testing.assert_close(R.clip(rows, 0.1)["a"]["w"], R.clip(flat, 0.1)["a.w"])
    torch.testing.assert_close(R.mean(rows)["a"]["w"], R.mean(flat)["a.w"])
    assert pexgrad.add_noise(R.mean(rows), 1.0, torch.tensor(1.0))["a"]["w"].shape == (2, 3)
    module = nn.Module()
    module.a, module.b = nn.Linear(3, 2, bias=False), nn.Parameter(torch.randn(4))
    R.to_module_grads(module, {"a": {"weight": torch.ones(2, 3)}, "b": torch.ones(4)})
    assert module.a.weight.grad.sum() == 6


def test_rows_with_one_name_for_two_entries():
    row = torch.randn(5, 2)
    with pytest.raises(pexgrad.InputError, match=r"two entries for 'a\.w'"):
        R.norms({"a.w": row, "a": {"w": row}})


def test_results_that_cannot_be_put_together():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_jacobian(model)
    with pytest.raises(pexgrad.InputError, match="a Jacobian, which cannot be put together"):
        pexgrad.chunked(fn, 2)(params, x, y)
    with pytest.raises(pexgrad.InputError, match="a Jacobian, which cannot be put together"):
        pexgrad.ensemble(fn)(pexgrad.stack_params(models()), x, y)
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    mean = pexgrad.over_loader(pexgrad.per_example_grad_norm(model), batches, reduce=torch.mean)
    with pytest.raises(pexgrad.InputError, match=r"\(\) without dimensions"):
        mean(params)
