"""Bad input: every error is a `PexgradError` that has the numbers in it and says what to do."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import torch.nn as nn
from cases.case import Net, labels, wave

import pexgrad
from pexgrad import PexgradError, clipped_grad, per_example_grad, per_example_value_and_grad

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])


def named(model):
    return dict(model.named_parameters())


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))


def batch(b=3):
    return torch.randn(b, 4), labels(b)


@STRATEGIES
def test_batch_sizes_of_x_and_y_disagree(strategy):
    net = model()
    with pytest.raises(PexgradError, match=r"(?s)3.*2|2.*3"):
        per_example_grad(net, strategy=strategy)(named(net), torch.randn(3, 4), labels(2))


@STRATEGIES
def test_batch_sizes_of_two_inputs_disagree(strategy):
    net = Net(lambda s, x, z: s.lin(x) + z.mean(), lin=nn.Linear(4, 5))
    with pytest.raises(PexgradError, match=r"(?s)3.*7|7.*3"):
        per_example_grad(net, wave, strategy=strategy)(
            named(net), (torch.randn(3, 4), torch.randn(7, 4)), None
        )


@STRATEGIES
def test_batch_sizes_deep_inside_disagree(strategy):
    net = Net(lambda s, batch: s.lin(batch["a"][0]), lin=nn.Linear(4, 5))
    x = ({"a": [torch.randn(3, 4), torch.randn(6)]},)
    with pytest.raises(PexgradError, match=r"(?s)3.*6|6.*3"):
        per_example_grad(net, wave, strategy=strategy)(named(net), x, None)


@STRATEGIES
def test_a_tensor_without_a_batch_dimension(strategy):
    net = Net(lambda s, x, t: s.lin(x) * t, lin=nn.Linear(4, 5))
    with pytest.raises(PexgradError, match=r"(?i)dimension"):
        per_example_grad(net, wave, strategy=strategy)(
            named(net), (torch.randn(3, 4), torch.tensor(2.0)), None
        )


@STRATEGIES
@pytest.mark.parametrize("x", [None, (), {}, (None, 3), 2.0], ids=repr)
def test_no_tensor_among_the_inputs(x, strategy):
    net = model()
    with pytest.raises(PexgradError, match=r"(?i)tensor"):
        per_example_grad(net, strategy=strategy)(named(net), x, labels(3))


@STRATEGIES
def test_unknown_parameter_name(strategy):
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?s)3\.weight"):
        per_example_grad(net, strategy=strategy)({**named(net), "3.weight": torch.randn(5)}, x, y)


def test_unknown_parameter_name_with_a_near_one_says_which_there_are():
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?s)2\.weigth.*2\.weight"):
        per_example_grad(net)({"2.weigth": net[2].weight}, x, y)


def test_the_second_name_of_a_tied_parameter():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    with pytest.raises(PexgradError, match=r"(?s)1\.weight"):
        per_example_grad(net, wave)({"1.weight": net[1].weight}, torch.randn(3, 4), None)


@STRATEGIES
def test_wrong_shape_of_a_parameter(strategy):
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?s)0\.weight.*(6, 4|\[6, 4\]|4, 6)"):
        per_example_grad(net, strategy=strategy)({**named(net), "0.weight": torch.randn(4, 6)}, x, y)


@STRATEGIES
def test_a_shape_that_would_broadcast_is_wrong_as_well(strategy):
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?s)0\.bias.*6"):
        per_example_grad(net, strategy=strategy)({**named(net), "0.bias": torch.randn(1)}, x, y)


@STRATEGIES
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integer_parameters(dtype, strategy):
    with pytest.raises(PexgradError, match=r"(?is)w.*(int64|bool|uint8)"):
        per_example_grad(lambda p, x: x * p["w"], wave, strategy=strategy)(
            {"w": torch.ones(4).to(dtype)}, torch.randn(3, 4), None
        )


@STRATEGIES
def test_no_parameters(strategy):
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?i)empty|no parameter"):
        per_example_grad(net, strategy=strategy)({}, x, y)


@pytest.mark.parametrize(
    "params", [[torch.randn(5, 4)], None, "weights", 3], ids=["list", "none", "text", "number"]
)
def test_parameters_that_are_no_dictionary(params):
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?i)dict|mapping"):
        per_example_grad(net)(params, x, y)


def test_the_parameters_of_the_module_as_they_come():
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?i)dict|mapping"):
        per_example_grad(net)(net.parameters(), x, y)


def test_an_entry_that_is_no_tensor():
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?s)0\.bias"):
        per_example_grad(net)({**named(net), "0.bias": [0.0] * 6}, x, y)


@pytest.mark.parametrize("bad", [0, 0.0, -1, -0.5, float("nan"), "1"], ids=repr)
def test_max_norm(bad):
    with pytest.raises(PexgradError, match=r"(?s)max_norm"):
        net, (x, y) = model(), batch()
        clipped_grad(net, max_norm=bad)(named(net), x, y)


@pytest.mark.parametrize("bad", [-2.5, float("nan")])
def test_max_norm_has_its_value_in_the_message(bad):
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=str(bad)):
        clipped_grad(net, max_norm=bad)(named(net), x, y)


@pytest.mark.parametrize("transform", [per_example_grad, per_example_value_and_grad])
@pytest.mark.parametrize(
    ("option", "bad", "say"),
    [
        ("strategy", "vmap", r"(?s)vmap.*crb"),
        ("strategy", None, r"(?s)None.*crb"),
        ("conv_rule", "fft", r"(?s)fft.*grouped"),
        ("chunk_size", 0, r"(?s)chunk_size.*0"),
        ("verify", "no", r"verify='no' must be True or False"),
        ("create_graph", 1, r"create_graph=1 must be True or False"),
        ("chunk_size", -3, r"(?s)chunk_size.*-3"),
        ("chunk_size", 2.5, r"(?s)chunk_size.*2\.5"),
        ("chunksize", 4, r"no option 'chunksize'.* chunk_size"),
    ],
)
def test_options(transform, option, bad, say):
    with pytest.raises(PexgradError, match=say):
        net, (x, y) = model(), batch()
        transform(net, **{option: bad})(named(net), x, y)


def test_a_model_that_cannot_be_called():
    with pytest.raises(PexgradError, match=r"(?i)module|function|callable"):
        per_example_grad(3)({"w": torch.randn(2)}, torch.randn(3, 2), None)


def test_a_loss_that_cannot_be_called():
    net, (x, y) = model(), batch()
    with pytest.raises(PexgradError, match=r"(?i)loss"):
        per_example_grad(net, "cross_entropy")(named(net), x, y)


def test_a_loss_that_is_a_class():
    with pytest.raises(
        PexgradError, match=r"the class CrossEntropyLoss; pass an instance of it, CrossEntropyLoss\(\)"
    ):
        per_example_grad(model(), nn.CrossEntropyLoss)


def test_a_bound_that_is_missing():
    with pytest.raises(PexgradError, match="max_norm is missing"):
        clipped_grad(model())


@STRATEGIES
def test_tensors_without_numbers(strategy):
    net = model().to("meta")
    with pytest.raises(PexgradError, match="meta device"):
        per_example_grad(net, strategy=strategy)(named(net), torch.randn(3, 4), torch.tensor([0, 1, 0]))


def test_every_error_is_one_of_ours():
    names = [e for e in vars(pexgrad).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert PexgradError in names
    assert all(issubclass(e, PexgradError) for e in names)


def test_without_a_graph_the_line_and_the_remedy_are_named():
    net = Net(lambda s, x: s.lin(x) if x.sum() > 0 else -s.lin(x), lin=nn.Linear(4, 5))
    with pytest.raises(PexgradError, match=r'(?s)test_errors\.py:\d+.*strategy="naive"'):
        per_example_grad(net)(named(net), *batch())


@STRATEGIES
@pytest.mark.parametrize("script", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(3, 4))])
@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_named(strategy, script):
    with pytest.raises(PexgradError, match=r"the model is scripted \(Sequential\)"):
        per_example_grad(script(model()), strategy=strategy)
    with pytest.raises(PexgradError, match=r"the module at '1' is scripted"):
        per_example_grad(nn.Sequential(nn.Identity(), script(model())), strategy=strategy)


@STRATEGIES
def test_a_lazy_parameter_is_named_and_works_once_it_has_a_shape(strategy):
    net, (x, y) = nn.Sequential(nn.LazyLinear(5)), batch()
    fn = per_example_grad(net, strategy=strategy)
    with pytest.raises(PexgradError, match=r"'0\.weight' is lazy"):
        fn(named(net), x, y)
    net(x)
    assert fn(named(net), x, y)["0.weight"].shape == (3, 5, 4)


@STRATEGIES
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_slices(strategy, kind):
    net, (x, y) = model(), batch()
    other = (
        torch.nested.nested_tensor(list(x)) if kind == "nested" else x.to_sparse(layout=getattr(torch, kind))
    )
    for bad in ((other, y), (x, other)):
        with pytest.raises(PexgradError, match=r"dense"):
            per_example_grad(net, strategy=strategy)(named(net), *bad)


def test_torch_prints_nothing_of_a_shape_that_does_not_fit(monkeypatch):
    printed = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", printed.append)
    net, (_, y) = Net(lambda s, x: x @ s.lin.weight, lin=nn.Linear(4, 5)), batch()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        per_example_grad(net)(named(net), torch.randn(3, 4), y)
    assert not printed


def test_what_is_no_tensor_or_no_number_where_one_belongs():
    net, (x, y) = nn.Linear(4, 5), batch()
    params = named(net)
    rows, J = per_example_grad(net)(params, x, y), pexgrad.per_example_jacobian(net)(params, x, y)
    by_function = clipped_grad(net, clip=torch.ones_like)
    wrong = [
        lambda: pexgrad.add_noise(params, 1.0, by_function.sensitivity),
        lambda: clipped_grad(net, max_norm=1.0)(params, x, y, mask=[True, False, True]),
        lambda: J.vjp([1.0, 2.0, 3.0]),
        lambda: J @ torch.randn(3),
        lambda: J.gram(torch.randn(3)),
        lambda: J.rows(out={"weight": 1}),
        lambda: pexgrad.rows.mean(rows, torch.ones(4)),
        lambda: pexgrad.rows.clip(rows, "a"),
        lambda: pexgrad.rows.clip(rows, True),
        lambda: per_example_grad(net)(params, x, y, out={"weight": 1, "bias": 1}),
        lambda: per_example_grad(net)(params, x, y, out=[1]),
        lambda: pexgrad.importance_sample([1.0, 2.0], 3),
        lambda: pexgrad.importance_sample(torch.tensor([1, 2]), 3),
        lambda: pexgrad.add_noise(by_function(params, x, y), 1.0, 1.0),
        lambda: pexgrad.project(pexgrad.per_example_jacobian(net), 3),
        lambda: pexgrad.noise_scale(J.moments(), None),
    ]
    for call in wrong:
        with pytest.raises(PexgradError, match=r"expected|must be|has no buffer"):
            call()


def test_numbers_of_numpy_are_numbers():
    net, (x, y) = nn.Linear(4, 5), batch()
    got = clipped_grad(net, max_norm=np.float32(0.5), chunk_size=np.int64(2))(named(net), x, y)
    want = clipped_grad(net, max_norm=0.5)(named(net), x, y)
    torch.testing.assert_close(got.grads, want.grads)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda w, i: w[:, i].movedim(0, -1),
        lambda w, i: w[..., i].movedim(0, -1),
        lambda w, i: w[i[:, 0] % 3, i[:, 1]][:, None],
        lambda w, i: w.T[i],
        lambda w, i: torch.nn.functional.embedding(i, w.T),
    ],
)
@pytest.mark.parametrize("wrong", [7, -9])
@STRATEGIES
def test_ids_out_of_range_in_a_later_batch(look_up, wrong, strategy):
    """They are the error that torch makes of them, and never those of another row."""
    fn = per_example_grad(
        lambda p, i: look_up(p["w"], i), lambda o, y: o.square().flatten(1).sum(1), strategy=strategy
    )
    params = {"w": torch.randn(3, 5)}
    fn(params, torch.tensor([[0, 1], [2, 4], [3, 3]]))
    with pytest.raises((IndexError, RuntimeError), match=r"(?i)out of|range"):
        fn(params, torch.tensor([[0, 1], [2, wrong], [3, 1]]))


def test_a_refusal_is_not_hidden_by_a_loss_of_single_examples():
    def forward(p, x):
        h = x * p["w"]
        return h if h.sum() > 0 else 2 * h

    fn = per_example_grad(forward, lambda o, y: o.flatten().dot(torch.ones(4)))
    with pytest.raises(pexgrad.TraceError, match="reads a number"):
        fn({"w": torch.randn(4)}, torch.randn(3, 4))
