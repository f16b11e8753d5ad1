"""Which parameters get rows: frozen, left out, tied, unused, reordered, and functions instead of modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import TABLE, Net, labels, wave
from models import each, pick
from oracle import assert_rows_equal, call, rows_of, rows_of_function

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))


def batch(b=3):
    return torch.randn(b, 4), labels(b)


def named(model):
    return dict(model.named_parameters())


@STRATEGIES
def test_rows_keep_the_order_of_the_dictionary(strategy):
    model, (x, y) = net(), batch()
    params = dict(reversed(named(model).items()))
    rows = pexgrad.per_example_grad(model, strategy=strategy)(params, x, y)
    want = rows_of(model, F.cross_entropy, x, y)
    assert_rows_equal(rows, {name: want[name] for name in params})


@STRATEGIES
def test_names_left_out_keep_the_values_of_the_model(strategy):
    model, (x, y) = net(), batch()
    rows = pexgrad.per_example_grad(model, strategy=strategy)(
        {"2.weight": model[2].weight.detach() * 2}, x, y
    )
    model[2].weight.data *= 2
    assert_rows_equal(rows, {"2.weight": rows_of(model, F.cross_entropy, x, y)["2.weight"]})


@STRATEGIES
def test_frozen_parameters_get_no_rows_though_they_are_given(strategy):
    model, (x, y) = net(), batch()
    model[0].weight.requires_grad_(False)
    params = {name: p * 1.5 for name, p in named(model).items()}  # the values given count, not their flags
    rows = pexgrad.per_example_grad(model, strategy=strategy)(params, x, y)
    for p in model.parameters():
        p.data *= 1.5
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))
    assert "0.weight" not in rows


@STRATEGIES
def test_detached_copies_get_rows(strategy):
    model, (x, y) = net(), batch()
    params = {name: p.detach().clone() for name, p in named(model).items()}
    assert_rows_equal(
        pexgrad.per_example_grad(model, strategy=strategy)(params, x, y),
        rows_of(model, F.cross_entropy, x, y),
    )


@STRATEGIES
def test_a_model_that_is_all_frozen_has_no_rows(strategy):
    model, (x, y) = net().requires_grad_(False), batch()
    assert pexgrad.per_example_grad(model, strategy=strategy)(named(model), x, y) == {}


def test_flags_are_read_at_every_call():
    model, (x, y) = net(), batch()
    fn = pexgrad.per_example_grad(model)
    assert list(fn(named(model), x, y)) == list(named(model))
    model[0].requires_grad_(False)
    assert list(fn(named(model), x, y)) == ["2.weight", "2.bias"]
    model[0].requires_grad_(True)
    assert_rows_equal(fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y))


@STRATEGIES
def test_a_tied_parameter_has_one_entry(strategy):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x = torch.randn(3, 4)
    rows = pexgrad.per_example_grad(model, wave, strategy=strategy)(named(model), x, None)
    assert list(rows) == ["0.weight", "0.bias", "2.bias"]
    assert_rows_equal(rows, rows_of(model, wave, x, None))


@STRATEGIES
def test_values_given_for_a_tied_parameter_reach_all_its_uses(strategy):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x = torch.randn(3, 4)
    params = {name: p.detach() * 0.5 for name, p in named(model).items()}
    rows = pexgrad.per_example_grad(model, wave, strategy=strategy)(params, x, None)
    for p in model.parameters():
        p.data *= 0.5
    assert_rows_equal(rows, rows_of(model, wave, x, None))


@STRATEGIES
def test_an_unused_parameter_has_rows_of_zeros(strategy):
    model = Net(lambda s, x: s.used(x), used=nn.Linear(4, 5), unused=nn.Linear(2, 3))
    x, y = batch()
    rows = pexgrad.per_example_grad(model, strategy=strategy)(named(model), x, y)
    assert rows["unused.weight"].shape == (3, 3, 2) and not rows["unused.weight"].any()


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_where_a_parameter_is_not_used(dtype, used):
    """Those that there would be if it were."""
    model = Net(lambda s, x: s.used(x), used=nn.Linear(4, 5), unused=nn.Linear(2, 3)).to(dtype)
    model.used.requires_grad_(used)
    jacobian = pexgrad.per_example_jacobian(model)(named(model), batch()[0].to(dtype), batch()[1])
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    direction = {k: torch.zeros_like(p) for k, p in jacobian.leaves.items()}
    each = jacobian.norms(per_param=True).values()
    assert {n.dtype for n in [*each, jacobian.norms(), jacobian @ direction, jacobian.gram()]} == {wide}


def test_two_functions_of_one_model_do_not_disturb_each_other():
    model, (x, y) = net(), batch()
    first, second = pexgrad.per_example_grad(model), pexgrad.per_example_grad(model, wave)
    want = rows_of(model, F.cross_entropy, x, y), rows_of(model, wave, x, y)
    for _ in range(2):
        assert_rows_equal(first(named(model), x, y), want[0])
        assert_rows_equal(second(named(model), x, None), want[1])


def test_nested_parameters_of_a_module_need_no_trace_of_their_own():
    model, (x, y) = net(), batch()
    nested = {str(i): dict(layer.named_parameters()) for i, layer in enumerate(model) if i != 1}
    fn = pexgrad.per_example_grad(model)
    flat, rows = fn(named(model), x, y), fn(nested, x, y)
    assert fn.trace_count == 1
    for k, layer in nested.items():
        assert all(torch.equal(rows[k][name], flat[f"{k}.{name}"]) for name in layer)


def test_a_step_of_training_between_calls():
    model, (x, y) = net(), batch()
    fn, optimizer = pexgrad.per_example_grad(model), torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(3):
        rows = fn(named(model), x, y)
        assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))
        for name, p in model.named_parameters():
            p.grad = rows[name].mean(0)
        optimizer.step()
    assert fn.trace_count == 1


# --- functions ------------------------------------------------------------------------------------


def affine(params, x):
    return torch.tanh(x @ params["w"] + params["b"]) @ params["v"]


def affine_case():
    return (
        affine,
        {"w": torch.randn(4, 6), "b": torch.randn(6), "v": torch.randn(6, 5)},
        torch.randn(3, 4),
        labels(3),
        F.cross_entropy,
    )


def convolve(params, x, *, stride):
    return F.conv2d(x, params["kernel"], params["bias"], stride)


def convolve_case():
    params = {"kernel": torch.randn(4, 2, 3, 3), "bias": torch.randn(4), "unused": torch.randn(2)}
    return convolve, params, {"x": torch.randn(3, 2, 7, 7), "stride": 2}, None, wave


def scan(params, tokens, lengths):
    h = params["start"]
    for t in range(tokens.shape[1]):
        h = torch.tanh(params["table"][tokens[:, t]] + h @ params["w"])
    return h * lengths[:, None]


def scan_case():
    params = {"table": torch.randn(7, 4), "w": torch.randn(4, 4), "start": torch.randn(4)}
    return scan, params, (torch.arange(15).view(3, 5) % 7, torch.rand(3)), None, wave


@STRATEGIES
@pytest.mark.parametrize("build", [affine_case, convolve_case, scan_case])
def test_functions(build, strategy):
    f, params, x, y, loss = build()
    rows = pexgrad.per_example_grad(f, loss, strategy=strategy)(params, x, y)
    assert_rows_equal(rows, rows_of_function(f, params, loss, x, y))
    assert not any(p.requires_grad for p in params.values())


CALLED = pick("""
    mlp conv2d_every_argument layer_called_twice frozen_backbone bag_mean_with_padding lstm
    relu_and_residual_in_place keyword_inputs_and_dict_output
""")


@each(CALLED)
def test_a_function_that_calls_a_module(case):
    model, x, y, loss = case.build()

    def f(params, *args, **kwargs):
        return torch.func.functional_call(model, params, args, kwargs)

    params = {name: p.detach() for name, p in model.named_parameters()}
    rows = pexgrad.per_example_grad(f, loss)(params, x, y)
    assert_rows_equal(rows, rows_of_function(f, params, loss, x, y))


def test_clipped_sum_and_losses_of_a_function():
    f, params, x, y, loss = affine_case()
    rows = rows_of_function(f, params, loss, x, y)
    out = pexgrad.clipped_grad(f, max_norm=1e6)(params, x, y)
    assert_rows_equal(out.grads, {k: r.sum(0) for k, r in rows.items()})
    torch.testing.assert_close(out.losses, F.cross_entropy(f(params, x), y, reduction="none"))


def test_lambda_around_a_module_in_the_table_is_the_same():
    model, x, y, loss = TABLE["mlp"].build()
    want = pexgrad.per_example_grad(model, loss)(named(model), x, y)
    got = pexgrad.per_example_grad(lambda p, x: torch.func.functional_call(model, p, (x,)), loss)(
        named(model), x, y
    )
    assert_rows_equal(got, want)
    assert call(model, x).requires_grad  # the module is as it was


def test_no_examples_have_the_dtypes_of_some():
    model = Net(
        lambda s, x: (x.double() @ s.wide).float() + s.narrow,
        wide=nn.Parameter(torch.randn(4, 3).double()),
        narrow=nn.Parameter(torch.randn(3).float()),
    )
    params, x = dict(reversed(named(model).items())), torch.randn(5, 4)
    norm = pexgrad.per_example_grad_norm(model, wave)
    assert norm(params, x).dtype == norm(params, x[:0]).dtype == torch.float64
    each = pexgrad.per_example_grad_norm(model, wave, per_param=True)
    some, none = each(params, x), each(params, x[:0])
    assert {k: n.dtype for k, n in some.items()} == {k: n.dtype for k, n in none.items()}


@pytest.mark.parametrize("kept", [0, 3])
def test_parameters_without_dimensions_and_no_examples_that_count(kept):
    def f(p, x):
        return x * p["a"]

    params, x = {"a": torch.tensor(2.0)}, torch.randn(kept, 4)
    clipped = pexgrad.clipped_grad(f, wave, max_norm=1.0)(params, x, mask=torch.zeros(kept, dtype=torch.bool))
    assert clipped.grads["a"].shape == () and clipped.grads["a"] == 0 and clipped.norms.shape == (kept,)
    assert pexgrad.clipped_grad(f, wave, max_norm=1.0)(params, x[:0]).grads["a"] == 0


def test_a_buffer_made_of_a_parameter_is_refused():
    """Part of the gradient would go through it."""
    model = Net(lambda s, x: F.linear(x - s.mean, s.w), w=nn.Parameter(torch.randn(5, 4)))
    model.register_buffer("mean", model.w.mean(0))
    x, y = batch()
    for strategy in ("crb", "naive"):
        with pytest.raises(pexgrad.InputError, match=r"buffer 'mean' has been computed from 'w'.*detach"):
            pexgrad.per_example_grad(model, strategy=strategy)(named(model), x, y)
    model.mean = model.mean.detach()
    rows = pexgrad.per_example_grad(model)(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def bags_count_each_id():
    """Whether torch divides an id's gradient by its own number; torch 2.9 by that of ids beside it too."""
    bag = nn.EmbeddingBag(3, 1, mode="sum", scale_grad_by_freq=True)
    (grad,) = torch.autograd.grad(bag(torch.tensor([[1, 1, 2]])).sum(), [bag.weight])
    return grad.flatten().tolist() == [0, 1, 1]


@pytest.mark.skipif(not bags_count_each_id(), reason="this torch miscounts ids")
def test_bags_scaled_by_frequency():
    """By how often an id occurs in its own example; the first two have none twice."""
    model = Net(lambda s, i: s.bag(i), bag=nn.EmbeddingBag(7, 5, mode="sum", scale_grad_by_freq=True))
    x, y = torch.tensor([[0, 1, 2], [3, 4, 5], [1, 1, 2]]), labels(3)
    rows = pexgrad.per_example_grad(model)(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


class Adapted(nn.Module):
    """Which names what is trained alone."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x):
        return self.base(x).tanh() + self.adapter(x)

    def named_parameters(self, *args, **kwargs):
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if n.startswith("adapter"))


@STRATEGIES
def test_a_model_that_does_not_name_all_its_parameters(strategy):
    model, (x, y) = Adapted(), batch()
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    for _ in range(2):
        rows = fn(named(model), x, y)
        assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))
        model.base.weight.data *= 2


# --- what a forward asks of its parameters, and does to them ----------------------------------------


class Gain(nn.Parameter):
    pass


def scaled(forward, gain=None):
    gain = nn.Parameter(torch.tensor(2.0)) if gain is None else gain
    return Net(lambda s, x: s.lin(x) * forward(s), lin=nn.Linear(4, 5), gain=gain)


ASKED = {
    "isinstance": lambda s: s.gain if isinstance(s.gain, nn.Parameter) else 3 * s.gain,
    "registered": lambda s: s.get_parameter("gain"),
    "leaf": lambda s: s.gain if s.gain.is_leaf else 3 * s.gain,
    "attribute": lambda s: s.gain * getattr(s.gain, "power", 1.0),
}


@pytest.mark.parametrize("strategy", ["crb", "naive"])
@pytest.mark.parametrize("asked", ASKED)
def test_what_a_forward_asks_of_a_parameter(asked, strategy):
    model, (x, y) = scaled(ASKED[asked]), batch()
    model.gain.power = 4.0
    fn = pexgrad.per_example_grad(model, strategy=strategy)
    assert_rows_equal(fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y))
    model.gain.power = 5.0
    assert_rows_equal(fn(named(model), x, y), rows_of(model, F.cross_entropy, x, y))


@STRATEGIES
def test_attributes_of_a_buffer(strategy):
    model, (x, y) = scaled(lambda s: s.lin.bias if isinstance(s.fixed, nn.Buffer) else 3.0), batch()
    model.fixed = nn.Buffer(torch.ones(()))
    rows = pexgrad.per_example_grad(model, strategy=strategy)(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_attributes_of_a_parameter_that_no_code_reads():
    model, (x, y) = net(), batch()
    fn = pexgrad.per_example_grad(model)
    for step in range(3):
        model[0].weight.seen = torch.full((step + 1,), step)
        fn(named(model), x, y)
    assert fn.trace_count == 1


def test_a_class_of_parameters_is_seen_by_a_loop_alone():
    def forward(s):
        return s.gain if type(s.gain) is Gain else 3 * s.gain

    model, (x, y) = scaled(forward, Gain(torch.tensor(2.0))), batch()
    rows = pexgrad.per_example_grad(model, strategy="naive")(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))
    with pytest.raises(pexgrad.VerificationError, match="the loss differs from the definition"):
        pexgrad.per_example_grad(model)(named(model), x, y)


def clamped(lin):
    with torch.no_grad():
        lin.weight.clamp_(-0.1, 0.1)


def zeroed_in_part(lin):
    with torch.no_grad():
        lin.weight[:, 0] = 0
        lin.bias.zero_()


def normalised_through_data(lin):
    lin.weight.data /= lin.weight.data.norm(dim=1, keepdim=True)


def given_other_data(lin):
    lin.weight.data = torch.renorm(lin.weight.data, 2, 0, 0.3)


WRITES = [clamped, zeroed_in_part, normalised_through_data, given_other_data]


@STRATEGIES
@pytest.mark.parametrize("write", WRITES)
def test_a_forward_that_writes_to_its_parameters(write, strategy):
    model, (x, y) = net(), batch()
    before = {name: p.detach().clone() for name, p in named(model).items()}
    model[0].register_forward_pre_hook(lambda lin, given: write(lin))
    rows = pexgrad.per_example_grad(model, strategy=strategy)(named(model), x, y)
    for name, p in named(model).items():
        assert torch.equal(p, before[name]), "a call leaves the model as it is"
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


@pytest.mark.parametrize("strategy", ["multi", "naive"])
def test_parameters_written_to_behind_their_use(strategy):
    """Each example finds them as they were."""
    model, (x, y) = net(), batch()
    model[0].register_forward_hook(lambda lin, given, out: clamped(lin))
    rows = pexgrad.per_example_grad(model, strategy=strategy)(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_data_of_another_shape():
    def forward(s, x):
        s.lin.weight.data = s.lin.weight.data[:3]
        return s.lin(x)

    model, (x, _) = Net(forward, lin=nn.Linear(4, 5, bias=False)), batch()
    with pytest.raises(
        pexgrad.TraceError, match=r"is given other data of shape \(3, 4\) in torch.float64 for \(5, 4\)"
    ):
        pexgrad.per_example_grad(model, wave)(named(model), x)
