"""The flat graph of a call: its numbers, its operations, and everywhere it runs."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net
from models import each, pick
from oracle import assert_rows_equal, copied, live, relative_error
from torch.utils._pytree import tree_leaves, tree_map

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

# A few of each kind: in place, tied, views of parameters, folds, ids, a fallback, a loss for one example.
FEW = pick("""
    layer_norm tied_embedding_and_head weight_norm sliced_weights columns_written time_inside_the_batch
    relu_and_residual_in_place frozen_backbone losses_over_tokens
""")
TRANSFORMS = {
    "rows": pexgrad.per_example_grad,
    "value_and_grad": pexgrad.per_example_value_and_grad,
    "norm": pexgrad.per_example_grad_norm,
    "norm_per_param": functools.partial(pexgrad.per_example_grad_norm, per_param=True),
    "clipped": functools.partial(pexgrad.clipped_grad, max_norm=0.3),
}


def assert_same(got, want, tol=1e-9):
    got, want = tree_leaves(got), tree_leaves(want)
    assert [g.shape for g in got] == [w.shape for w in want]
    floor = max(1e-4 * sum(w.norm() ** 2 for w in want) ** 0.5, 1e-12)
    assert all(relative_error(g, w, floor) < tol for g, w in zip(got, want, strict=True) if w.numel())


def named(model):
    return dict(model.named_parameters())


def small():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(32, 3, bias=False)
    )
    return model, named(model), torch.randn(4, 1, 4, 4), torch.tensor([0, 2, 1, 1])


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, named(model), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])


@each(FEW)
def test_same_numbers_as_the_function_and_over_stacked_parameters(case):
    model, x, y, loss = case.build()
    fn = pexgrad.per_example_grad(model, loss)
    graph = fn.lower(named(model), copied(x), copied(y))
    assert_same(graph(named(model), copied(x), copied(y)), fn(named(model), copied(x), copied(y)))
    assert list(graph(named(model), copied(x), copied(y))) == list(live(model))
    stacked = {k: torch.stack([p.detach(), p.detach() * 1.1]) for k, p in named(model).items()}
    want = [fn({k: p[i] for k, p in stacked.items()}, copied(x), copied(y)) for i in range(2)]
    got = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, copied(x), copied(y))
    assert_same(got, {k: torch.stack([w[k] for w in want]) for k in want[0]})


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform(name):
    model, params, x, y = small()
    fn = TRANSFORMS[name](model)
    graph = fn.lower(params, x, y)
    for b in (4, 3, 1):
        assert_same(graph(params, x[:b], y[:b]), fn(params, x[:b], y[:b]))
    assert graph.meta["batch"] == "any"


@pytest.mark.parametrize("conv_rule", ["auto", "measure", "grouped", "unfold", "loop"])
def test_every_rule_of_convolutions(conv_rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    params, x, y = named(model), torch.randn(4, 3, 6, 6), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model, conv_rule=conv_rule)
    fn(params, x, y)  # with "measure", what it found for 4 examples is no answer for any number of them
    graph = fn.lower(params, x, y)
    for b in (4, 3, 1):
        assert_same(graph(params, x[:b], y[:b]), fn(params, x[:b], y[:b]))
    # no groups for no examples
    assert graph.meta["batch"] == ("1 or more" if conv_rule == "grouped" else "any")


def test_norms_of_repeated_ids():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 3))
    x, y = torch.tensor([[0, 0, 1, 0], [4, 3, 3, 4]]), torch.tensor([0, 1])
    fn = pexgrad.per_example_grad_norm(model)
    graph = fn.lower(named(model), x, y)
    assert_same(graph(named(model), x, y), fn(named(model), x, y))


@pytest.mark.parametrize("name", ["rows", "clipped"])
def test_a_graph_that_fails_on_no_examples_says_so(name):
    def forward(
        self, x
    ):  # two views of each example, split after one pass: torch splits nothing into nothing
        one, two = self.lin(torch.cat([x, x.flip(-1)])).split(len(x))
        return one * two

    model = Net(forward, lin=nn.Linear(4, 3))
    fn = TRANSFORMS[name](model)
    params, x, y = named(model), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    graph = fn.lower(params, x, y)
    assert graph.meta["batch"] == "1 or more"
    assert_same(graph(params, x[:1], y[:1]), fn(params, x[:1], y[:1]))
    with pytest.raises(pexgrad.InputError, match="1 or more, and x has 0 examples"):
        graph(params, x[:0], y[:0])


def test_only_functional_operations():
    model, params, x, y = mlp()
    model.insert(1, nn.ReLU(inplace=True))
    params = named(model)
    graph = pexgrad.per_example_grad(model).lower(params, x, y)
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    overloads = [t for t in targets if isinstance(t, torch._ops.OpOverload)]
    assert overloads and not any(t._schema.is_mutable for t in overloads)
    assert {n.op for n in graph.graph.nodes} <= {
        "placeholder",
        "call_function",
        "call_method",
        "get_attr",
        "output",
    }


def test_it_prints_with_names_and_shapes():
    model, params, x, y = small()
    text = pexgrad.per_example_grad(model).lower(params, x, y).print_readable(print_output=False)
    assert "params_0_weight" in text and "result_3_weight" in text
    assert 'result_0_weight: "f64[s' in text and "2, 1, 3, 3]" in text


def test_parameters_left_out_are_the_models_own():
    model, params, x, y = mlp()
    some = {k: params[k] for k in ("2.weight", "0.bias")}
    fn = pexgrad.per_example_grad(model)
    graph = fn.lower(some, x, y)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert_rows_equal(graph(some, x, y), fn(some, x, y))
    assert "0_weight" in dict(graph.named_buffers()) and not list(graph.parameters())


def test_a_loss_for_one_example_makes_a_graph_for_one_batch_size():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, lambda out, y: F.cross_entropy(out * 2, y) + out.median())
    graph = fn.lower(params, x, y)
    assert graph.meta["batch"] == 4
    assert_rows_equal(graph(params, x, y), fn(params, x, y))
    assert_rows_equal(fn.lower(params, x[:2], y[:2])(params, x[:2], y[:2]), fn(params, x[:2], y[:2]))
    for again in (graph, pickle.loads(pickle.dumps(graph)), torch.compile(graph, backend="aot_eager")):
        with pytest.raises(pexgrad.InputError, match="this graph is for batches of 4, and x has 2 examples"):
            again(params, x[:2], y[:2])
    stacked = {k: torch.stack([p.detach(), p.detach() * 1.1]) for k, p in params.items()}
    for b in (4, 2):  # under vmap the function lowers for each size by itself
        got = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x[:b], y[:b])
        assert_rows_equal({k: g[0] for k, g in got.items()}, fn(params, x[:b], y[:b]))


def test_a_graph_says_which_batch_sizes_it_serves():
    model = nn.LSTM(3, 2)
    params, x = named(model), torch.randn(4, 5, 3)
    fn = pexgrad.per_example_grad(
        lambda p, x: torch.func.functional_call(model, p, (x.transpose(0, 1),))[0][-1],
        lambda out, _: out.square().sum(1),
    )
    graph = fn.lower(params, x)
    assert graph.meta["batch"] in ("any", "2 or more", 4)  # torch 2.11 fixes the size
    for b in (4, 2) if graph.meta["batch"] != 4 else (4,):
        assert_same(graph(params, x[:b], None), fn(params, x[:b]))
    assert_same(fn.lower(params, x[:1])(params, x[:1], None), fn(params, x[:1]))


def test_no_examples():
    model, params, x, y = small()
    for name in TRANSFORMS:
        fn = TRANSFORMS[name](model)
        assert_same(fn.lower(params, x, y)(params, x[:0], y[:0]), fn(params, x[:0], y[:0]))


@pytest.mark.parametrize(
    "function", [torch.linalg.inv, lambda a: torch.linalg.cholesky(a @ a.mT), torch.linalg.inv_ex]
)
def test_a_failed_factorisation_gives_nan(function):
    def f(p, x):
        a = function(p["a"])
        return x @ (a if isinstance(a, torch.Tensor) else a[0])

    params, x = {"a": torch.randn(3, 3) + 3 * torch.eye(3)}, torch.randn(4, 3)
    fn = pexgrad.per_example_grad(f, lambda out, _: out.square().sum(1))
    graph = fn.lower(params, x)
    assert_same(graph(params, x, None), fn(params, x))
    assert not graph({"a": torch.zeros(3, 3)}, x, None)["a"].isfinite().all()


def test_a_linear_system():
    def f(p, x):
        return torch.linalg.solve(p["a"], x.mT).mT.flatten(1)

    params, x = {"a": torch.randn(3, 3) + 3 * torch.eye(3)}, torch.randn(4, 2, 3)
    fn = pexgrad.per_example_grad(f, lambda out, _: out.square().sum(1))
    assert_same(fn.lower(params, x)(params, x, None), fn(params, x))


def test_vectors_computed_without_autograd_while_training():
    """Spectral normalisation writes to its buffers with gradients off."""
    model = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    params, x, y = named(model), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model)
    assert_same(fn.lower(params, x, y)(params, x, y), fn(params, x, y))


def test_nested_parameters():
    params = {"in": {"w": torch.randn(4, 6)}, "out": torch.randn(6, 3)}
    fn = pexgrad.per_example_grad(lambda p, x: torch.tanh(x @ p["in"]["w"]) @ p["out"])
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    graph = fn.lower(params, x, y)
    assert_same(graph(params, x, y), fn(params, x, y))
    assert graph(params, x, y)["in"]["w"].shape == (5, 4, 6)


def test_vmap_over_parameters_and_over_data():
    model, params, x, y = mlp()
    fn = pexgrad.clipped_grad(model, max_norm=0.3)
    graph = fn.lower(params, x, y)
    stacked = {k: torch.stack([p.detach(), p.detach() * 1.1]) for k, p in params.items()}
    members = [{k: p[i] for k, p in stacked.items()} for i in range(2)]
    want = tree_map(lambda *r: torch.stack(r), *(fn(m, x, y) for m in members))
    assert_same(torch.func.vmap(graph, in_dims=(0, None, None))(stacked, x, y), want)
    xs, ys = torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
    want = tree_map(
        lambda *r: torch.stack(r),
        *(fn(m, *xy) for m, xy in zip(members, [(x, y), (x.flip(0), y.flip(0))], strict=True)),
    )
    assert_same(torch.func.vmap(graph)(stacked, xs, ys), want)


RANDOM = {
    "dropout": lambda h: F.dropout(h),
    "alpha_dropout": lambda h: F.alpha_dropout(h, training=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu_in_place": lambda h: F.rrelu(h * 1, training=True, inplace=True),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(-1, 2),
    "normal_": lambda h: h * torch.empty_like(h).normal_(1, 3),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(2),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_(),
    "cauchy_": lambda h: h * torch.empty_like(h).cauchy_(),
    "geometric_": lambda h: h * torch.empty_like(h).geometric_(0.5),
    "random_": lambda h: h * torch.empty_like(h).random_(5),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn": lambda h: h * torch.randn(h.shape),
    "normal_of_tensors": lambda h: h * torch.normal(h.detach(), 1.0),
    "normal_of_numbers": lambda h: h * torch.normal(1.0, 2.0, h.shape[1:]),
    "multinomial": lambda h: h * torch.multinomial(h.softmax(-1), 2)[:, :1],
    "poisson": lambda h: h * torch.poisson(h.detach().abs()),
}
if torch.__version__ >= "2.12":  # no shape for it before
    RANDOM["gamma"] = lambda h: torch._standard_gamma(h.exp())


@pytest.mark.parametrize("kind", RANDOM)
def test_random_models(kind):
    """The same numbers from the same seed; the function's first call and lowering leave the generator alone."""
    first, second = nn.Linear(4, 6), nn.Linear(6, 3)
    model = nn.ModuleList([first, second])
    model.forward = lambda x: second(RANDOM[kind](first(x)))
    params, x, y = named(model), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model)
    torch.manual_seed(1)
    want = fn(params, x, y)
    torch.manual_seed(1)
    assert_same(fn(params, x, y), want, tol=1e-15)
    torch.manual_seed(1)
    graph = fn.lower(params, x, y)
    assert_same(graph(params, x, y), want)


def test_pickled_and_copied():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    graph = fn.lower(params, x, y)
    for again in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert_rows_equal(again(params, x, y), fn(params, x, y))


def test_exported_saved_and_loaded():
    model, params, x, y = mlp()
    fn = pexgrad.clipped_grad(model, max_norm=0.3)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        fn.lower(params, x, y), (params, x, y), dynamic_shapes=(dict.fromkeys(params), {0: batch}, {0: batch})
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    got = loaded(params, x[:3], y[:3])
    assert isinstance(got, pexgrad.Clipped)
    assert_same(got, fn(params, x[:3], y[:3]))


def test_compiled_as_a_whole():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    compiled = torch.compile(fn.lower(params, x, y), fullgraph=True, backend="aot_eager")
    assert_rows_equal(compiled(params, x, y), fn(params, x, y))


# --- derivatives of the rows ----------------------------------------------------------------------


def test_rows_are_constants_without_create_graph():
    model, params, x, y = mlp()
    graph = pexgrad.per_example_grad(model).lower(params, x, y)
    assert not any(r.requires_grad for r in graph(params, x, y).values())


def test_rows_can_be_differentiated_with_create_graph():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, create_graph=True)
    graph = fn.lower(params, x, y)

    def derivative(f):
        return torch.autograd.grad(
            sum(r.sin().sum() for r in f(params, x, y).values()), list(params.values())
        )

    assert_same(derivative(graph), derivative(fn))


def test_autocast_inside_the_model_is_no_change_of_gradients():
    def model(p, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.tanh(x @ p["u"])
        return h.float() @ p["v"]

    params = {k: torch.randn(4, 4, dtype=torch.float, requires_grad=True) for k in ("u", "v")}
    x, y = torch.randn(5, 4, dtype=torch.float), torch.tensor([0, 1, 2, 0, 1])
    fn = pexgrad.per_example_grad(model, create_graph=True)
    got, want = (
        torch.autograd.grad(sum(r.square().sum() for r in of(params, x, y).values()), list(params.values()))
        for of in (fn.lower(params, x, y), fn)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_graph_that_would_forget_a_stopped_gradient_is_refused():
    def gated(p, x):
        return (x @ p["w"]) * (x @ p["w"]).detach()

    params, x, y = {"w": torch.randn(4, 3)}, torch.randn(5, 4), torch.arange(5) % 3
    with pytest.raises(pexgrad.TraceError, match=r"stops or changes gradients \(detach at .*test_lower.py"):
        pexgrad.per_example_grad(gated, create_graph=True).lower(params, x, y)
    fn = pexgrad.per_example_grad(gated)
    assert_same(fn.lower(params, x, y)(params, x, y), fn(params, x, y))


# --- refusals ---------------------------------------------------------------------------------------


def test_a_graph_without_a_derivative_says_so():
    def spectrum(p, x):
        frames = torch.stft(
            x @ p["w"], 16, 4, window=torch.ones(16, dtype=x.dtype), center=False, return_complex=True
        )
        return frames.abs().mean(-1)

    params, x, y = {"w": torch.randn(4, 16, requires_grad=True)}, torch.randn(5, 4), torch.arange(5) % 9
    pexgrad.per_example_grad(spectrum).lower(params, x, y)
    with pytest.raises(
        pexgrad.TraceError, match=r"flat graph of this call does not run.*call the function itself"
    ):
        pexgrad.per_example_grad(spectrum, create_graph=True).lower(params, x, y)


def test_what_has_no_graph_says_so():
    model, params, x, y = mlp()
    with pytest.raises(pexgrad.InputError, match="PerExampleJacobian returns an operator"):
        pexgrad.per_example_jacobian(model).lower(params, x, y)
    with pytest.raises(pexgrad.TraceError, match="strategy='naive' has no flat graph"):
        pexgrad.per_example_grad(model, strategy="naive").lower(params, x, y)


@pytest.mark.parametrize("name", ["norm", "norm_per_param", "clipped"])
def test_uses_of_one_word_that_cancel(name):
    """The norm of their sum is not taken from the products of all pairs."""

    def forward(s, x):
        a, b, c = s.table(x).unbind(1)
        return s.out(0.3 * a + 0.7 * b - 1.0000001 * c)

    model = Net(forward, table=nn.Embedding(50, 4), out=nn.Linear(4, 3))
    model.out.requires_grad_(False)
    params, x, y = named(model), torch.arange(12).view(4, 3), torch.tensor([0, 2, 1, 1])
    graph, again = TRANSFORMS[name](model).lower(params, x, y), x[:, :1].expand(4, 3)
    assert_same(graph(params, again, y), TRANSFORMS[name](model, strategy="naive")(params, again, y))


def test_no_examples_through_batch_norm():
    """torch's own kernel of its derivative divides by the number of elements."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), nn.BatchNorm1d(5)).eval()
    params, x, y = named(model), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model)
    graph = fn.lower(params, x, y)
    for b in (0, 2):
        assert_same(graph(params, x[:b], y[:b]), fn(params, x[:b], y[:b]))
    stacked = {k: torch.stack([p.detach(), 2 * p.detach()]) for k, p in params.items()}
    assert torch.func.vmap(fn, (0, None, None))(stacked, x[:0], y[:0])["0.weight"].shape == (2, 0, 5, 4)


def test_a_loss_of_distributions_whose_checks_read_numbers(monkeypatch):
    # torch.compile turns them off for good
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def loss(o, y):
        posterior = torch.distributions.Normal(*o)
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        return torch.distributions.kl_divergence(posterior, prior).sum(1) - posterior.log_prob(y).sum(1)

    model = Net(lambda s, x: (s.mean(x), s.spread(x).exp()), mean=nn.Linear(3, 2), spread=nn.Linear(3, 2))
    params, x, y = named(model), torch.randn(5, 3), torch.randn(5, 2)
    fn = pexgrad.per_example_grad(model, loss)
    graph, want = fn.lower(params, x, y), pexgrad.per_example_grad(model, loss, strategy="naive")
    for b in (5, 2, 3):
        assert_same(graph(params, x[:b], y[:b]), want(params, x[:b], y[:b]))
    alone = torch.func.vmap(lambda x, y: fn(params, x[None], y[None]))(x, y)
    assert_same({k: r.squeeze(1) for k, r in alone.items()}, want(params, x, y))
    with pytest.raises(ValueError, match="Expected parameter loc"):  # there are numbers to be checked
        fn(params, x * torch.nan, y)


@pytest.mark.parametrize(
    "part", [slice(-2, None), slice(1, -1), slice(-9, 3), slice(2, 9), slice(-5, -1, 2), slice(4, 2)]
)
def test_parts_counted_from_the_end_that_are_written_to_under_vmap(part):
    def forward(s, x):
        out = torch.zeros(len(x), 6)
        out[:, part] = s.first(x)[:, part]
        return s.last(out + x)

    model = Net(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 3))
    params, x, y = named(model), torch.randn(4, 6), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model)
    two = {k: torch.stack([p.detach(), 2 * p.detach()]) for k, p in params.items()}
    got = torch.func.vmap(fn, (0, None, None))(two, x, y)
    for i in range(2):
        assert_same({k: r[i] for k, r in got.items()}, fn({k: p[i] for k, p in two.items()}, x, y))
