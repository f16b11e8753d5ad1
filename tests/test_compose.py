"""Calls from anywhere: modes, threads, torch.func transforms, torch.compile, nested parameters, pickle."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import namedtuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels
from oracle import assert_rows_equal, rows_of
from test_lower import TRANSFORMS, assert_same, mlp, named, small
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_map

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = ("crb", "multi", "naive")


def members(stacked):
    return [{k: p[i] for k, p in stacked.items()} for i in range(len(next(iter(stacked.values()))))]


def stack(results):
    return tree_map(lambda *r: torch.stack(r), *results)


def ensemble_of(params, n=2):
    return {k: torch.stack([p.detach() * (1 + i / 10) for i in range(n)]) for k, p in params.items()}


# --- modes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_autograd_is_off(mode, strategy, traced):
    model, params, x, y = small()
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    if traced:
        fn(params, x, y)
    with mode():
        rows = fn(params, x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))
    assert not any(r.requires_grad for r in rows.values())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_made_in_inference_mode(strategy, inside):
    model, params, x, y = small()
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    with torch.inference_mode():
        made = tree_map(torch.clone, (params, x, y))
    with torch.inference_mode(inside):
        rows = fn(*made)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_the_jacobian_in_inference_mode():
    model, params, x, y = small()
    want = pexgrad.per_example_jacobian(model)(params, x, y)
    with torch.inference_mode():
        J = pexgrad.per_example_jacobian(model)(params, x, y)
        assert_rows_equal(J.rows(), want.rows())
        torch.testing.assert_close(J.norms(), want.norms())
        torch.testing.assert_close(J @ params, want @ params)


def test_rows_for_a_second_derivative_in_no_grad():
    model, params, x, y = mlp()
    with torch.no_grad():
        rows = pexgrad.per_example_grad(model, create_graph=True)(params, x, y)
    assert all(r.requires_grad for r in rows.values())


def test_the_mode_is_left_as_it_was():
    model, params, x, y = mlp()
    with torch.inference_mode():
        pexgrad.per_example_grad(model)(params, x, y)
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()


def test_autocast():
    model, params, x, y = mlp()
    model = model.float()
    params, x = named(model), x.float()
    fn = pexgrad.per_example_grad(model)
    exact = fn(params, x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = fn(params, x, y)
        want = rows_of(model, F.cross_entropy, x, y)
    assert all(r.dtype == torch.float32 for r in rows.values())
    assert_rows_equal(rows, {k: w.float() for k, w in want.items()}, tol=2e-2)
    assert any(not torch.equal(rows[k], exact[k]) for k in rows)


class CastsWithin(nn.Module):
    """A model that chooses half precision itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x).float()


@pytest.fixture
def _own_kernels():
    """Without oneDNN, which has no recurrent layer in bfloat16 for some CPUs."""
    before = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("_own_kernels")
@pytest.mark.parametrize("within", [False, True])
def test_the_rounding_of_half_precision_is_not_taken_for_an_error(within):
    """Steps of a recurrence round each intermediate value, otherwise for one example than for two."""
    torch.manual_seed(0)
    lstm = nn.LSTM(16, 32, 2, batch_first=True).float()
    model = Net(lambda s, x: s.lstm(x)[0].float(), lstm=lstm)
    model = CastsWithin(model) if within else model

    def loss(out, _):
        return out.square().mean((1, 2))

    x, params = torch.randn(2, 20, 16).float(), named(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not within):
        rows = pexgrad.per_example_grad(model, loss)(params, x)
        want = rows_of(model, loss, x, None)
    assert_rows_equal(rows, want, tol=5e-2)
    with pytest.raises(AssertionError):
        assert_rows_equal(rows, want, tol=5e-3)


def test_each_dtype_of_autocast_has_a_trace_of_its_own():
    model = nn.Linear(4, 3).float()
    params, x, y = named(model), torch.randn(5, 4).float(), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(model)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y), tol=2e-2)
    assert fn.trace_count == 2


def test_deterministic_mode():
    model, params, x, y = small()
    torch.use_deterministic_algorithms(True)
    try:
        rows = pexgrad.per_example_grad(model)(params, x, y)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_threads():
    """Several threads share one function, whose first calls trace, and each has one of its own."""
    model, params, x, y = mlp()
    want = rows_of(model, F.cross_entropy, x, y)
    shared, answers, start = pexgrad.per_example_grad(model), [], threading.Barrier(4)

    def work():
        start.wait()
        answers.append(shared(params, x, y))
        answers.append(pexgrad.per_example_grad(model)(params, x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(answers) == 8 and shared.trace_count == 1
    for rows in answers:
        assert_rows_equal(rows, want)


# --- torch.func -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSFORMS)
def test_vmap_over_parameters_and_data(name):
    model, params, x, y = small()
    fn, stacked = TRANSFORMS[name](model), ensemble_of(params)
    xs, ys = torch.stack([x, x.flip(0)], 1), torch.stack([y, y.flip(0)])
    got = torch.func.vmap(fn, in_dims=(0, 1, 0))(stacked, xs, ys)
    want = [fn(m, *xy) for m, xy in zip(members(stacked), [(x, y), (x.flip(0), y.flip(0))], strict=True)]
    assert_same(got, stack(want))


def test_nested_vmap():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    three = ensemble_of(params, 3)
    grid = {k: torch.stack([p, -p]) for k, p in three.items()}
    xs = torch.stack([x, 2 * x, 3 * x])
    got = torch.func.vmap(torch.func.vmap(fn, in_dims=(0, 0, None)), in_dims=(0, None, None))(grid, xs, y)
    want = stack([stack([fn(m, xs[i], y) for i, m in enumerate(members(row))]) for row in members(grid)])
    assert_same(got, want)
    assert got["0.weight"].shape == (2, 3, 4, 6, 4)


def test_plain_tensors_inside_vmap():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad_norm(model)
    got = torch.func.vmap(lambda s: s * fn(params, x, y))(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(got, torch.stack([fn(params, x, y), 2 * fn(params, x, y)]))


@pytest.mark.parametrize("clip", ["flat", "per_parameter", "automatic"])
def test_vmap_with_a_mask(clip):
    """Of one batch for all members, and of each member's own; what it leaves out may be anything."""
    model, params, x, y = mlp()
    fn, stacked = pexgrad.clipped_grad(model, max_norm=0.3, clip=clip), ensemble_of(params, 3)
    mask = torch.tensor([True, False, True, True])
    padded = x.masked_fill(~mask[:, None], float("nan"))
    got = torch.func.vmap(lambda p: fn(p, padded, y, mask=mask))(stacked)
    assert_same(got, stack([fn(m, x, y, mask=mask) for m in members(stacked)]))
    masks = torch.stack([mask, ~mask, torch.zeros(4, dtype=torch.bool)])
    got = torch.func.vmap(lambda p, mask: fn(p, x, y, mask=mask))(stacked, masks)
    assert_same(got, stack([fn(m, x, y, mask=k) for m, k in zip(members(stacked), masks, strict=True)]))


def test_vmap_under_autocast():
    model, params, x, y = mlp()
    model = model.float()
    params, x = named(model), x.float()
    fn, stacked = pexgrad.per_example_grad(model), ensemble_of(params)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y)
        want = stack([fn(m, x, y) for m in members(stacked)])
    assert_same(got, want, 1e-2)


def test_buffers_are_read_at_each_call():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    params, x, y = named(model), torch.randn(5, 4), torch.arange(5) % 3
    fn, stacked = pexgrad.per_example_grad(model), ensemble_of(named(model))
    torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y)
    model[1].running_mean = torch.randn(3)
    got = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y)
    assert_same(got, stack([fn(m, x, y) for m in members(stacked)]))
    assert set(params) == set(got)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch's own, on the first jvp
def test_grad_and_jvp_of_rows():
    model, params, x, y = mlp()
    params = {k: p.detach().requires_grad_() for k, p in params.items()}
    fn = pexgrad.per_example_grad(model, create_graph=True)

    def total(p):
        return sum(r.sin().sum() for r in fn(p, x, y).values())

    detached = {k: p.detach() for k, p in params.items()}
    got = torch.func.grad(total)(detached)
    assert_same(list(got.values()), torch.autograd.grad(total(params), list(params.values())))
    _, tangent = torch.func.jvp(total, (detached,), (detached,))
    torch.testing.assert_close(tangent, sum((got[k] * p).sum() for k, p in detached.items()))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`:FutureWarning"
)  # torch's own, on the first dual number
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("of", ["params", "x"])
def test_dual_numbers_of_forward_mode(name, of):
    """Tangents are those of `torch.func.jvp`; they are never lost in silence."""
    model, params, x, y = mlp()
    params = {k: p.detach() for k, p in params.items()}
    fn = TRANSFORMS[name](model, create_graph=True)
    at = params if of == "params" else {"x": x}
    along = {k: torch.randn_like(t) for k, t in at.items()}

    def answer(at):
        return fn(at, x, y) if of == "params" else fn(params, at["x"], y)

    _, want = torch.func.jvp(answer, (at,), (along,))
    with forward_ad.dual_level():
        dual = answer({k: forward_ad.make_dual(t, along[k]) for k, t in at.items()})
        got = [forward_ad.unpack_dual(t).tangent for t in pytree.tree_leaves(dual)]
        assert_same(got, pytree.tree_leaves(want))
        with pytest.raises(pexgrad.InputError, match="in forward mode or with torch"):
            TRANSFORMS[name](model)(params, forward_ad.make_dual(x, x), y)


def test_what_does_not_compose_says_so():
    model, params, x, y = mlp()
    stacked = ensemble_of(params)

    def over(fn, **options):
        return torch.func.vmap(lambda p: fn(p, x, y, **options))(stacked)

    fn = pexgrad.per_example_grad(model)
    with pytest.raises(pexgrad.InputError, match="takes PerExampleGrad with create_graph=True"):
        torch.func.grad(lambda p: fn(p, x, y)["0.bias"].sum())(params)
    with pytest.raises(pexgrad.InputError, match="PerExampleGrad takes no out= inside"):
        over(fn, out=fn(params, x, y))
    with pytest.raises(
        pexgrad.InputError, match=r"takes no mask= inside a torch\.func transform where clip is a function"
    ):
        over(pexgrad.clipped_grad(model, clip=torch.ones_like), mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(pexgrad.InputError, match=r"mask \(4,\) is in"):
        over(pexgrad.clipped_grad(model, max_norm=1.0), mask=torch.ones(4))
    with pytest.raises(pexgrad.InputError, match="PerExampleJacobian returns an operator"):
        over(pexgrad.per_example_jacobian(model))
    with pytest.raises(pexgrad.TraceError, match="strategy='multi' has no flat graph"):
        over(pexgrad.per_example_grad(model, strategy="multi"))


# --- torch.compile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["value_and_grad", "norm", "norm_per_param", "clipped"])
def test_compiled(name):
    model, params, x, y = mlp()
    fn = TRANSFORMS[name](model)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for b in (4, 3):
        assert_same(compiled(params, x[:b], y[:b]), fn(params, x[:b], y[:b]))


@pytest.mark.parametrize("name", ["rows", "norm", "clipped"])
def test_compiled_by_inductor_at_changing_batch_sizes(name):
    model, params, x, y = mlp()
    fn = TRANSFORMS[name](model)
    compiled = torch.compile(fn, fullgraph=True)
    for b in (4, 3, 2, 4):
        assert_same(compiled(params, x[:b], y[:b]), fn(params, x[:b], y[:b]))


def test_a_compiled_training_step():
    def step(params, x, y):
        out = fn(params, x, y)
        return {k: p - 0.1 * out.grads[k] / len(x) for k, p in params.items()}, out.norms

    model, params, x, y = mlp()
    fn = pexgrad.clipped_grad(model, max_norm=0.3)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = theirs = {k: p.detach() for k, p in params.items()}
    for b in (4, 3, 4):
        (ours, norms), (theirs, want) = compiled(ours, x[:b], y[:b]), step(theirs, x[:b], y[:b])
        assert_same([ours, norms], [theirs, want])


def test_threads_trace_different_models_at_once():
    models = [nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 3)) for n in range(2, 8)]
    x, y = torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    answers, start = {}, threading.Barrier(len(models))

    def work(i):
        start.wait()
        fn = pexgrad.per_example_grad(models[i])
        answers[i] = fn(named(models[i]), x, y), fn.lower(named(models[i]), x, y)(named(models[i]), x, y)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, model in enumerate(models):
        want = rows_of(model, F.cross_entropy, x, y)
        for rows in answers[i]:
            assert_rows_equal(rows, want)


def test_inside_a_compiled_function():
    """With operations before and after, a cast, a mask, nested parameters and a vmap."""
    model, params, x, y = mlp()
    rows, clipped = pexgrad.per_example_grad(model), pexgrad.clipped_grad(model, max_norm=0.3)
    nested = pexgrad.per_example_grad(lambda p, x: torch.tanh(x @ p["a"]["w"]))
    stacked = ensemble_of(params)

    def step(params, x, y, mask, w):
        squares = {k: (r * r).sum() for k, r in rows({k: 2 * p for k, p in params.items()}, x + 1, y).items()}
        some = clipped(params, x, y, mask=mask)
        every = torch.func.vmap(lambda p: rows(p, x, y))(stacked)
        return squares, some, nested({"a": {"w": w}}, x, y), every

    args = params, x, y, torch.tensor([True, False, True, False]), torch.randn(4, 3)
    assert_same(torch.compile(step, fullgraph=True, backend="aot_eager")(*args), step(*args))


def test_autocast_inside_a_compiled_function():
    model, params, x, y = mlp()
    model = model.float()
    params, x = named(model), x.float()
    fn = pexgrad.per_example_grad(model)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(params, x, y)

    got, plain = torch.compile(step, fullgraph=True, backend="aot_eager")(x), fn(params, x, y)
    assert_same(got, step(x), 1e-6)
    assert any(not torch.equal(got[k], plain[k]) for k in plain)


def test_what_is_not_one_operation_runs_between_two_graphs():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, create_graph=True)
    rows = torch.compile(lambda x: fn(params, x + 1, y), backend="aot_eager")(x)
    assert all(r.requires_grad for r in rows.values())
    assert_rows_equal(rows, fn(params, x + 1, y))


# --- functions of nested parameters -------------------------------------------------------------------


def flat_params():
    return {"in.w": torch.randn(4, 6), "in.b": torch.randn(6), "out": torch.randn(6, 3)}


def nested_params(flat):
    return {"in": {"w": flat["in.w"], "b": flat["in.b"]}, "out": flat["out"]}


def flat_net(p, x):
    return torch.tanh(x @ p["in.w"] + p["in.b"]) @ p["out"]


def nested_net(p, x):
    return torch.tanh(x @ p["in"]["w"] + p["in"]["b"]) @ p["out"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_nested_parameters_give_a_nested_result(name, strategy):
    flat, x, y = flat_params(), torch.randn(5, 4), torch.arange(5) % 3
    fns = [TRANSFORMS[name](f, strategy=strategy) for f in (nested_net, flat_net)]
    got, want = fns[0](nested_params(flat), x, y), fns[1](flat, x, y)
    assert_same(got, want)
    part = got.grads if name == "clipped" else got[1] if name == "value_and_grad" else got
    if name != "norm":
        assert list(part) == ["in", "out"] and list(part["in"]) == ["w", "b"]


def test_nested_parameters_of_a_module():
    model, params, x, y = mlp()
    nested = {i: {"weight": params[f"{i}.weight"], "bias": params[f"{i}.bias"]} for i in "02"}
    fn = pexgrad.per_example_grad(model)
    assert_same(fn(nested, x, y), fn(params, x, y))


def test_nested_parameters_are_traced_once():
    flat, x, y = flat_params(), torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(nested_net)
    for b in (5, 3, 4):
        fn(nested_params(flat), x[:b], y[:b])
    assert fn.trace_count == 1


def test_nested_rows_into_a_buffer():
    flat, x, y = flat_params(), torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(nested_net)
    first = fn(nested_params(flat), x, y)
    again = fn(nested_params(flat), x + 1, y, out=first)
    assert again["in"]["w"].data_ptr() == first["in"]["w"].data_ptr()


def test_one_name_for_two_parameters_is_refused():
    w = torch.randn(4, 3)
    with pytest.raises(pexgrad.InputError, match=r"two entries for 'a\.w'"):
        pexgrad.per_example_grad(lambda p, x: x @ p["a.w"])(
            {"a.w": w, "a": {"w": w}}, torch.randn(2, 4), torch.zeros(2).long()
        )


def test_nested_numbers_inside_compiled_code():
    params, x = {0: {"w": torch.randn(4, 3)}}, torch.randn(5, 4)
    fn = pexgrad.per_example_grad(lambda p, x: x @ p[0]["w"])
    y = torch.arange(5) % 3
    assert_same(torch.compile(lambda x: fn(params, x, y), backend="eager")(x), fn(params, x, y))


def numbered_net(p, x):
    return torch.tanh(x @ p[0] + p[1]) @ p[2]


def test_parameters_by_number():
    flat, x, y = flat_params(), torch.randn(5, 4), torch.arange(5) % 3
    params, v = dict(enumerate(flat.values())), dict(enumerate(torch.randn_like(p) for p in flat.values()))

    def named(results):
        return {k: results[i] for i, k in enumerate(flat)}

    fn, want = pexgrad.per_example_grad(numbered_net), pexgrad.per_example_grad(flat_net)(flat, x, y)
    rows = fn(params, x, y)
    assert list(rows) == [0, 1, 2]
    assert_same(named(rows), want)
    assert_same(named(fn(params, x, y, out=rows)), want)
    jacobian = pexgrad.per_example_jacobian(numbered_net)(params, x, y)
    torch.testing.assert_close(jacobian @ v, pexgrad.rows.dot(want, named(v)))
    bounds = {0: 0.1, 1: 0.2, 2: 0.3}
    clipped = pexgrad.clipped_grad(numbered_net, max_norm=bounds)(params, x, y)
    assert_same(
        named(clipped.grads), pexgrad.clipped_grad(flat_net, max_norm=named(bounds))(flat, x, y).grads
    )


def test_two_bounds_for_one_number():
    with pytest.raises(pexgrad.InputError, match="two bounds"):
        pexgrad.clipped_grad(numbered_net, max_norm={0: 1.0, "0": 2.0})


def test_vmap_over_nested_parameters():
    flat, x, y = flat_params(), torch.randn(5, 4), torch.arange(5) % 3
    fn = pexgrad.per_example_grad(nested_net)
    stacked = ensemble_of(flat)
    got = torch.func.vmap(fn, in_dims=(0, None, None))(nested_params(stacked), x, y)
    assert_same(got, stack([fn(nested_params(m), x, y) for m in members(stacked)]))


# --- pickle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("again", [lambda f: pickle.loads(pickle.dumps(f)), copy.copy, copy.deepcopy])
def test_a_function_can_be_pickled_and_copied(again, traced):
    model, params, x, y = mlp()
    fn = pexgrad.clipped_grad(model, nn.CrossEntropyLoss(), max_norm=0.3)
    want = fn(params, x, y) if traced else None
    other = again(fn)
    assert other.trace_count == 0 and other.sensitivity == 0.3
    assert_same(other(params, x, y), want if traced else fn(params, x, y))


def test_a_function_that_cannot_be_pickled_says_why():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, lambda out, y: F.cross_entropy(out, y))
    with pytest.raises(pexgrad.PexgradError, match="because its loss cannot"):
        pickle.dumps(fn)
    assert_rows_equal(copy.deepcopy(fn)(params, x, y), fn(params, x, y))
    with pytest.raises(pexgrad.PexgradError, match="because its model cannot"):
        pickle.dumps(pexgrad.per_example_grad(lambda p, x: x))


def test_tensors_of_inference_mode_inside_a_transform():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    with torch.inference_mode():
        made = x + 1
    want = fn(params, x + 1, y)
    got = torch.func.vmap(lambda s: s * fn(params, made, y)["0.weight"])(torch.ones(2))
    torch.testing.assert_close(got[1], want["0.weight"])


def test_named_tuples_inside_a_compiled_function():
    """They are no plain tuples: the call is made between two compiled graphs."""
    pair = namedtuple("pair", "a b")
    layer = nn.Linear(3, 3)
    fn = pexgrad.per_example_grad(
        Net(lambda s, t, extra=None: s.lin(t[0]) if extra is None else s.lin(t) * extra, lin=layer)
    )
    params, a, y = {f"lin.{k}": p for k, p in named(layer).items()}, torch.randn(4, 3), labels(4, 3)
    compiled = torch.compile(lambda p, a, b, y: fn(p, (pair(a, b),), y), backend="eager")
    assert_same(compiled(params, a, a + 1, y), fn(params, (pair(a, a + 1),), y))


# --- what a call reads beside its arguments --------------------------------------------------------


def closures():
    """name -> norms summed, as a function of a coefficient that no argument carries."""
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    params = {k: p.detach() for k, p in named(model).items()}

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3), nn.Buffer(torch.ones(()))

        def forward(self, x):
            return self.linear(x) * self.scale

    scaled = Scaled()

    def of_loss(c):
        fn = pexgrad.per_example_grad_norm(model, lambda o, y: (o.square() * c).sum(1), create_graph=True)
        return fn(params, x).sum()

    def of_function(c):
        fn = pexgrad.per_example_grad_norm(
            lambda p, x: x @ p["weight"].T * c, lambda o, y: o.square().sum(1), create_graph=True
        )
        return fn({"weight": params["weight"]}, x).sum()

    def of_buffer(c):
        before, scaled.scale = scaled.scale, c
        try:
            fn = pexgrad.per_example_grad_norm(scaled, lambda o, y: o.square().sum(1), create_graph=True)
            return fn({k: p.detach() for k, p in named(scaled).items()}, x).sum()
        finally:
            scaled.scale = before

    return {"loss": of_loss, "function": of_function, "buffer": of_buffer}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch's own, on the first jvp
@pytest.mark.parametrize("where", closures())
def test_a_transform_of_what_is_no_argument_is_refused(where):
    """It would be a constant of the call: a derivative of zero, in silence."""
    f, c = closures()[where], torch.tensor(2.0)
    for call in (
        lambda: torch.func.grad(f)(c),
        lambda: torch.func.vmap(f)(c.expand(2)),
        lambda: torch.func.jvp(f, (c,), (c,)),
    ):
        with pytest.raises(pexgrad.PexgradError, match="belongs to that transform"):
            call()
    leaf = c.clone().requires_grad_()
    (got,) = torch.autograd.grad(f(leaf), leaf)
    with torch.no_grad():
        step = 1e-2
        want = (f(c + step) - f(c - step)) / (2 * step)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_vmap_over_a_mask_alone():
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), labels(5, 3)
    params = {k: p.detach() for k, p in named(model).items()}
    fn = pexgrad.clipped_grad(model, max_norm=0.3)
    masks = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]], dtype=torch.bool)
    got = torch.func.vmap(lambda mask: fn(params, x, y, mask=mask).norms)(masks)
    torch.testing.assert_close(got, torch.stack([fn(params, x, y, mask=m).norms for m in masks]))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["buffer", "parameter"])
def test_state_that_the_same_compiled_function_changes(backend, what):
    """Compiled code reorders what it does not know to depend on one another."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, 3))
    params, x, y = {"2.weight": model[2].weight}, torch.randn(5, 4), labels(5, 3)
    fn = pexgrad.per_example_grad_norm(model)
    held = model[1].running_var if what == "buffer" else model[0].weight.detach()

    def step(x):
        before = fn(params, x, y)
        held.mul_(4.0)
        return before, fn(params, x, y)

    want = step(x)
    held.div_(4.0)
    if (backend, what) != ("inductor", "buffer"):
        with pytest.raises(pexgrad.InputError, match="is changed in the same compiled function"):
            torch.compile(step, backend=backend)(x)
    else:  # it changes things in their place, in order
        torch.testing.assert_close(torch.compile(step, backend=backend)(x), want)
