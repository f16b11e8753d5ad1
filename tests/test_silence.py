"""Ways to a wrong number that no one family of models has in common."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels, param
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_rows_equal, rows_of

import pexgrad
from pexgrad.base.memory import is_injective, overlap, refuse_shared
from pexgrad.extend import replaced
from pexgrad.rules.linear import linear_weight

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


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return 3 * g


@pytest.mark.parametrize(
    ("write", "use"),
    [
        (lambda s, x, h: DoubledInPlace.apply(h), lambda s, x, h: h),
        (lambda s, x, h: DoubledInPlace.apply(h[:, 1:]), lambda s, x, h: h.tanh()),
        (lambda s, x, h: DoubledInPlace.apply(h.view(-1, 3, 1)), lambda s, x, h: h),
        (lambda s, x, h: DoubledInPlace.apply(h), lambda s, x, h: h * DoubledInPlace.apply(h)),
        (lambda s, x, h: DoubledInPlace.apply(x), lambda s, x, h: s.lin(x) + h),
        (lambda s, x, h: DoubledInPlace.apply(x[:, 2:]), lambda s, x, h: s.lin(x)),
        (lambda s, x, h: DoubledInPlace.apply(s.scale), lambda s, x, h: h * s.scale),
    ],
)
def test_what_a_function_of_ones_own_writes_to(write, use):
    """It is used afterwards, the function's result is not; what belongs to the caller stays as it is."""

    def forward(s, x):
        h = s.lin(x.clone())
        write(s, x, h)
        return use(s, x, h)

    model = Net(forward, lin=nn.Linear(4, 3), scale=nn.Buffer(torch.ones(3)))
    fn = pexgrad.per_example_grad(model)
    for b in (5, 2, 7):
        x, y = torch.randn(b, 4), labels(b, 3)
        before = x.clone()
        want = rows_of(model, F.cross_entropy, before.clone(), y)
        model.scale.fill_(1)
        assert_rows_equal(fn(named(model), x, y), want)
        assert torch.equal(x, before)
        assert torch.equal(model.scale, torch.ones(3))


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
    with pytest.raises(pexgrad.InputError, match="may share memory"):
        fn(params, x, out={"a": room, "b": room})
    with pytest.raises(pexgrad.InputError, match="may show one element"):
        fn(params, x, out={"a": room, "b": torch.zeros(6).expand(4, 6)})
    with pytest.raises(pexgrad.InputError, match="may show one element"):
        fn(params, x, out={"a": room, "b": torch.zeros(9).unfold(0, 6, 1)})
    long = torch.zeros(7, 6)
    with pytest.raises(pexgrad.InputError, match="may share memory"):
        fn(params, x, out={"a": long[:4], "b": long[3:]})
    with pytest.raises(pexgrad.InputError, match=r"out\['a'\].* and x may share|x and out\['a'\] may share"):
        fn(params, x, out={"a": x, "b": room})
    assert fn(params, x, out={"a": torch.zeros(4, 7)[:, :6], "b": room})["a"].abs().sum()
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


class Queries(nn.Module):
    """A parameter, and a buffer, that are the input of a layer."""

    def __init__(self):
        super().__init__()
        self.q, self.of_q, self.of_shift = (
            nn.Parameter(torch.randn(1, 3, 6)),
            nn.Linear(6, 3),
            nn.Linear(6, 3),
        )
        self.register_buffer("shift", torch.randn(1, 3, 6))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x):
        b = x.shape[0]
        return (
            (self.of_q(self.q.expand(b, -1, -1)) + self.of_shift(self.shift.expand(b, -1, -1))).tanh()
            * x[:, None, :3]
            * self.scale.sinh()
        )


def queries(create_graph=False):
    torch.manual_seed(0)
    model, x = Queries(), torch.randn(4, 6)
    jacobian = pexgrad.per_example_jacobian(
        model, lambda o, _: o.sin().sum((1, 2)), create_graph=create_graph
    )
    return model, jacobian(named(model), x), x


@pytest.mark.parametrize("changed", ["q", "shift", "scale"])
def test_a_jacobian_whose_parameters_or_buffers_have_changed(changed):
    model, jacobian, _ = queries()
    jacobian.rows()
    with torch.no_grad():
        getattr(model, changed).mul_(2)
    with pytest.raises(pexgrad.InputError, match="changed in place"):
        jacobian.rows()


def test_a_jacobian_of_what_has_not_been_read_goes_on():
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    jacobian = pexgrad.per_example_jacobian(model)(named(model), x, labels(4, 3))
    want = rows_of(model, F.cross_entropy, x, labels(4, 3))
    with torch.no_grad():
        model.weight.mul_(2)  # no row depends on it any more
    assert_rows_equal(jacobian.rows(), want)


def test_a_differentiable_jacobian_after_a_step():
    model, jacobian, _ = queries(create_graph=True)
    (jacobian.norms() ** 2).sum().backward(retain_graph=True)
    torch.optim.SGD(model.parameters(), 0.1).step()
    for use in (jacobian.rows, jacobian.norms, lambda: jacobian.T @ torch.ones(4)):
        with pytest.raises(pexgrad.InputError, match="changed in place"):
            use()


def test_inner_products_and_projections_with_what_has_changed():
    model, x, z = nn.Linear(6, 3), torch.randn(4, 6), torch.randn(4, 6)
    fn = pexgrad.per_example_jacobian(model)
    jacobian, other = fn(named(model), z, labels(4, 3)), fn(named(model), x, labels(4, 3))
    x.zero_()
    with pytest.raises(pexgrad.InputError, match="changed in place"):
        jacobian.gram(other)
    with pytest.raises(pexgrad.InputError, match="changed in place"):
        pexgrad.project(other, 4)


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
def test_rows_of_an_operator_are_the_callers_own(strategy):
    model = Net(lambda s, x: torch.einsum("bi,bj,ij->b", x, x, s.w), w=param(6, 6))
    fn = pexgrad.per_example_jacobian(model, lambda o, _: o, strategy=strategy)
    for jacobian in (fn(named(model), x := torch.randn(4, 6)), fn(named(model), x).keep()):
        norms = jacobian.norms()
        for r in jacobian.rows().values():
            r.mul_(3)
        torch.testing.assert_close(jacobian.norms(), norms)


def test_weights_made_in_place_leave_the_norms():
    model, x = nn.Linear(6, 3), torch.randn(4, 6)
    out = pexgrad.clipped_grad(model, clip=lambda norms: norms.clamp_(max=0.1))(named(model), x, labels(4, 3))
    torch.testing.assert_close(out.norms, pexgrad.per_example_grad_norm(model)(named(model), x, labels(4, 3)))


def test_gradients_of_a_module_are_its_own():
    model = nn.Linear(6, 3)
    grads = {k: torch.randn_like(p) for k, p in named(model).items()}
    before = {k: g.clone() for k, g in grads.items()}
    pexgrad.rows.to_module_grads(model, grads)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(grads, before, rtol=0, atol=0)


def test_the_mean_of_rows_in_half_precision():
    rows = {"w": torch.full((64, 3), 3000.0, dtype=torch.float16)}
    torch.testing.assert_close(pexgrad.rows.mean(rows)["w"], rows["w"][0])
    torch.testing.assert_close(pexgrad.rows.mean(rows, torch.ones(64))["w"], rows["w"][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_under_autocast_are_of_the_parameters_precision(dtype):
    """In float16 the squares of these gradients would overflow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5)).float()
    x, y = torch.randn(64, 16, dtype=torch.float32), labels(64, 5)
    loss = lambda o, y: 3000 * F.cross_entropy(o.float(), y, reduction="none")  # noqa: E731
    with torch.autocast("cpu", dtype):
        jacobian = pexgrad.per_example_jacobian(model, loss)(named(model), x, y)
        flat = pexgrad.rows.flatten(jacobian.rows()).double()
        gram, second = jacobian.gram(), pexgrad.rows.flatten(jacobian.moments().second, batch_dims=0)
        clipped = pexgrad.clipped_grad(model, loss, max_norm=1e9)(named(model), x, y).grads
    clipped = pexgrad.rows.flatten(clipped, batch_dims=0)
    for got, want in ((gram, flat @ flat.T), (second, flat.square().mean(0)), (clipped, flat.sum(0))):
        assert got.dtype == torch.float32
        assert (got.double() - want).norm() < 1e-2 * want.norm()


def test_derivatives_where_gradients_are_no_derivatives():
    model = nn.Embedding(6, 3, scale_grad_by_freq=True)
    fn = pexgrad.per_example_grad(model, lambda o, _: o.sin().sum((1, 2)), create_graph=True)
    with pytest.raises(pexgrad.PexgradError, match="scale_grad_by_freq"):
        fn(named(model), torch.tensor([[1, 1, 2]]))


@pytest.mark.parametrize("layer", [nn.LayerNorm(30), nn.GroupNorm(3, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_zero_but_for_rounding(layer, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), layer).to(dtype)
    rows = pexgrad.per_example_grad(model, lambda o, _: o.sum(1))(
        named(model), torch.randn(8, 20, dtype=dtype)
    )
    assert rows["0.weight"].abs().max() < 1e3 * torch.finfo(dtype).eps


def test_buffers_over_a_buffer_of_the_model_and_beside_one_another():
    model = Net(lambda s, x: s.lin(x) * s.b[0], lin=nn.Linear(6, 3), empty=nn.Parameter(torch.zeros(5, 0)))
    model.register_buffer("b", torch.randn(4, 3))
    params, x, y = named(model), torch.randn(4, 6), labels(4, 3)
    fn = pexgrad.per_example_grad(model, chunk_size=2)
    rows = fn(params, x, y)
    with pytest.raises(pexgrad.InputError, match="a buffer"):
        fn(params, x, y, out={**rows, "lin.bias": model.b})
    both = torch.zeros(4, 3, 7)  # a line holds an output's weights and its bias
    got = fn(params, x, y, out={**rows, "lin.weight": both[:, :, :6], "lin.bias": both[:, :, 6]})
    assert_rows_equal(got, rows_of(model, F.cross_entropy, x, y))
    jacobian = pexgrad.per_example_jacobian(model)(params, x, y)
    with pytest.raises(pexgrad.InputError, match="may share memory"):
        jacobian.rows(out={**rows, "lin.weight": both[:, :, :6], "lin.bias": both[:, :, 0]})


@given(st.data())
def test_memory_that_is_shared(data):
    """Against the sets of addresses: what shares an element is never taken to be apart."""
    memory = torch.zeros(60)

    def view():
        size = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        stride = data.draw(
            st.lists(st.sampled_from([1, 2, 3, 6, 7, 12]), min_size=len(size), max_size=len(size))
        )
        return memory.as_strided(size, stride, data.draw(st.integers(0, 12)))

    def places(t):
        return torch.arange(60).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()

    a, b, c = view(), view(), view()
    for t in (a, b, c):
        assert not is_injective(t.shape, t.stride()) or len(set(places(t))) == t.numel()
    if not set(places(a)).isdisjoint(places(b)):
        assert overlap(a, b)
    apart = len({p for t in (a, b, c) for p in places(t)}) == a.numel() + b.numel() + c.numel()
    try:
        refuse_shared({"a": a, "b": b, "c": c}, [])
    except pexgrad.InputError:
        return
    assert apart


def test_many_buffers_in_one_matrix():
    memory = torch.zeros(4, 300)
    columns = {str(i): memory[:, i : i + 1] for i in range(300)}
    refuse_shared(columns, [])
    with pytest.raises(pexgrad.InputError, match="may share"):
        refuse_shared({**columns, "more": memory[:, 7:9]}, [])


def test_a_jacobian_of_a_model_with_a_sparse_buffer():
    model = nn.Linear(6, 3)
    for name in ("a", "b"):
        model.register_buffer(name, torch.eye(3).to_sparse())
    rows = pexgrad.per_example_grad(model)(named(model), torch.randn(4, 6), labels(4, 3))
    pexgrad.per_example_grad(model)(named(model), torch.randn(4, 6), labels(4, 3), out=rows)
    assert pexgrad.per_example_jacobian(model)(
        named(model), torch.randn(4, 6), labels(4, 3)
    ).norms().shape == (4,)


def test_a_jacobian_of_derived_parameters_goes_on_where_others_change():
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Softmax(dim=1))
    nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Softplus())
    x, y = torch.randn(5, 6), labels(5, 3)
    jacobian = pexgrad.per_example_jacobian(model)(named(model), x, y)
    want = rows_of(model, F.cross_entropy, x, y)
    y.zero_()
    with torch.no_grad():
        model[2].bias.zero_()
        model[2].parametrizations.weight.original.zero_()  # whose derivative has been taken
    assert_rows_equal(jacobian.rows(), want)
    with torch.no_grad():
        model[0].parametrizations.weight.original.mul_(2)
    with pytest.raises(pexgrad.InputError, match="changed in place"):
        jacobian.rows()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [1.3, 2.0, -1.0])
def test_a_wrong_rule_in_any_precision(dtype, factor):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16))]
    model, x, y = nn.Sequential(*layers).to(dtype), torch.randn(4, 16, dtype=dtype), labels(4, 16)

    def wrong(g, input, *, shape, dtype):
        return linear_weight(g * factor, input, shape=shape, dtype=dtype)

    with replaced(torch.ops.aten.linear.default, "weight", wrong), pytest.raises(pexgrad.VerificationError):
        pexgrad.per_example_grad(model)(named(model), x, y)
