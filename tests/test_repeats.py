"""Small calls that are made again and again, which one flat graph answers: the same bits, and everything still noticed."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net
from models import each, pick
from oracle import assert_rows_equal, rows_of
from test_lower import TRANSFORMS, assert_same, mlp, named
from torch.utils._pytree import tree_leaves

import pexgrad
from pexgrad.calls import repeats, transform
from pexgrad.factors import _base
from pexgrad.flat import plain
from pexgrad.losses.loss import LossFunction

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """The third call is the first that a graph may answer, however long it takes."""
    monkeypatch.setattr(repeats, "OFTEN", 1)
    monkeypatch.setattr(repeats, "WORTHWHILE", float("inf"))
    monkeypatch.setattr(repeats, "_seconds", lambda *_: 0.0)


def graphs(fn):
    every = [known for of in fn._graphs.repeats._known.values() for known in of.values()]
    return [known.graph for known in every if known.graph is not None]


def same_bits(a, b):
    return all(map(torch.equal, tree_leaves(a), tree_leaves(b)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_same_bits(name):
    model, params, x, y = mlp()
    fn = TRANSFORMS[name](model)
    answers = [fn(params, x, y) for _ in range(4)]
    assert len(graphs(fn)) == 1
    assert all(same_bits(a, answers[0]) for a in answers)
    assert not any(t.requires_grad for t in tree_leaves(answers[3]))


def test_without_autograd(monkeypatch):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    for _ in range(2):
        want = fn(params, x, y)
    monkeypatch.setattr(torch.autograd, "grad", None)
    assert same_bits(fn(params, x, y), want)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["norm", "norm_per_param", "clipped"])
def test_norms_of_small_rows(name):
    layers = nn.Conv1d(4, 8, 3), nn.Tanh(), nn.Linear(6, 5), nn.Flatten(), nn.Linear(40, 3)
    model, x, y = nn.Sequential(*layers), torch.randn(4, 4, 8), torch.tensor([0, 2, 1, 1])
    params, fn = named(model), TRANSFORMS[name](model)
    answers = [fn(params, x, y) for _ in range(4)]
    assert len(graphs(fn)) == 1
    assert all(same_bits(a, answers[0]) for a in answers)
    assert_same(answers[0], TRANSFORMS[name](model, strategy="naive")(params, x, y))
    assert_same(fn.lower(params, x, y)(params, x[:3], y[:3]), fn(params, x[:3], y[:3]))


@pytest.mark.parametrize("name", ["norm", "norm_per_param", "clipped"])
def test_positions_that_cancel_later(name):
    """Their norms are taken of the rows by the code itself: the graph has taken inner products of positions, and says so."""

    def forward(s, x):
        a, b = s.linear(x).unbind(1)
        return a - b

    model, make = Net(forward, linear=nn.Linear(64, 48, bias=False)), TRANSFORMS[name]
    fn, params, x, y = make(model), named(model), torch.randn(4, 2, 64), torch.tensor([0, 2, 1, 1])
    for _ in range(4):
        fn(params, x, y)
    (graph,) = graphs(fn)
    assert graph.doubts
    x = x[:, :1] + 1e-3 * x + 100
    assert graph.run([*params.values(), x, y]) is None
    assert same_bits(fn(params, x, y), make(model)(params, x, y))


def test_new_values_and_batches():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    for b in (4, 2, 4, 3):
        for scale in (1.0, 2.0, 3.0):
            with torch.no_grad():
                model[0].weight.mul_(scale)
            assert_rows_equal(
                fn(params, scale * x[:b], y[:b]), rows_of(model, F.cross_entropy, scale * x[:b], y[:b])
            )
    assert len(graphs(fn)) == 3


def test_what_changes_on_the_model_is_noticed():
    model = nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.1), nn.LayerNorm(6), nn.Linear(6, 3))
    params, x, y = named(model), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        fn(params, x, y)
    assert graphs(fn)
    model[1].negative_slope = 0.6
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    model[2].eps = 0.1
    assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    params["0.bias"].requires_grad_(False)
    assert "0.bias" not in fn(params, x, y)


NOT_PLAIN = {  # what a recording would forget: checks of values, random numbers, and settings that choose an algorithm
    "one_hot": lambda h: h + F.one_hot(h.detach().argmax(-1) * 0, 3),
    "inverse": lambda h: h @ torch.linalg.inv(torch.eye(3)),
    "dropout": lambda h: F.dropout(h),
    "attention": lambda h: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0],
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_only_plain_operations(kind):
    model, x, y = nn.ModuleList([nn.Linear(4, 3)]), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    model.forward = lambda x: NOT_PLAIN[kind](model[0](x))
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        fn(named(model), x, y)
    assert not graphs(fn)


def test_buffers_and_losses_of_single_examples_are_left():
    for model, loss in (
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(), F.cross_entropy),
        (nn.Linear(4, 3), lambda output, y: (output * y).view(-1).softmax(0).square().sum()),
    ):
        fn, x = pexgrad.per_example_grad(model, loss), torch.randn(4, 4)
        y = torch.arange(4) % 3 if loss is F.cross_entropy else torch.rand(4, 3)
        for _ in range(3):
            fn(named(model), x, y)
        assert not graphs(fn)


@each(pick("layer_norm tied_embedding_and_head weight_norm relu_and_residual_in_place frozen_backbone"))
def test_other_models(case):
    model, x, y, loss = case.build()
    fn = pexgrad.per_example_grad(model, loss)
    for _ in range(4):
        assert_rows_equal(fn(named(model), x, y), rows_of(model, loss, x, y))


def in_module(output, y):
    return torch.nn.functional.cross_entropy(output, y, reduction="none")


def of_two_lines(output, y):
    log = output.log_softmax(-1)
    return F.nll_loss(log, y, reduction="none") + 0.1 * log.square().mean(1)


def with_a_global(output, y):
    return SCALE * F.cross_entropy(output, y, reduction="none")


SCALE, seen = 1.0, []
FEW_OPERATIONS = [
    in_module,
    of_two_lines,
    lambda o, y: F.cross_entropy(o, y, reduction="none"),
    lambda o, y: F.cross_entropy(o, y),
    lambda o, y: (o - y.unsqueeze(1).float()).square().mean() + 0.1 * o.abs().sum(),
    lambda o, y, scale=0.5: (scale * (o - y.unsqueeze(1).float()) ** 2).sum(1),
]
MORE = [
    lambda o, y, f=in_module: f(o, y),
    lambda o, y, *, f=in_module: f(o, y),
    with_a_global,
    lambda o, y: (seen.append(1), F.cross_entropy(o, y, reduction="none"))[1],
    lambda o, y: (print(end=""), F.cross_entropy(o, y, reduction="none"))[1],
    lambda o, y: (o * F.one_hot(y, 3)).sum(1),
    lambda o, y: (F.dropout(o) * o).sum(1),
    lambda o, y: torch.stack([F.cross_entropy(a, b) for a, b in zip(o, y, strict=True)]),
    (lambda scale: lambda o, y: scale * o.sum(1))(2.0),
    lambda o, y: sum(o.transpose(0, 1)),
    lambda o, y: o.exp().sum(1) if o.shape[1] > 1 else o.sum(1),
]


def tolerant(output, y):
    try:
        return F.cross_entropy(output, y, reduction="none")
    except:  # noqa: E722
        return output.sum(1)


def storing(output, y):
    y.mean = output.mean()
    return F.cross_entropy(output, y, reduction="none")


def writing(output, y):
    y[:] = 0
    return F.cross_entropy(output, y, reduction="none")


def adding(output, y):
    output += 1
    return F.cross_entropy(output, y, reduction="none")


def importing(output, y):
    from functional import exp  # pyright: ignore[reportMissingImports]

    return exp(output).sum(1)


MORE += [tolerant, storing, writing, adding]


@pytest.mark.parametrize("loss", FEW_OPERATIONS)
def test_losses_of_a_few_operations(loss):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, loss)
    answers = [fn(params, x, y) for _ in range(4)]
    assert len(graphs(fn)) == 1
    assert all(same_bits(a, answers[0]) for a in answers)
    assert_rows_equal(answers[3], rows_of(model, loss, x, y))


def test_code_that_imports_is_not_plain():
    assert not plain.is_plain_loss(LossFunction(importing))


@pytest.mark.parametrize("loss", MORE)
def test_losses_that_may_do_more(loss):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, loss)
    for _ in range(4):
        fn(params, x, y)
    assert not graphs(fn)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss,
        lambda weight, reduction: functools.partial(F.cross_entropy, weight=weight, reduction=reduction),
        lambda weight, reduction: nn.BCEWithLogitsLoss(pos_weight=weight, reduction=reduction),
    ],
)
def test_class_weights_changed_in_place(name, loss):
    model, params, x, y = mlp()
    if not isinstance(loss, type) and isinstance(loss(weight=None, reduction="sum"), nn.BCEWithLogitsLoss):
        y = F.one_hot(y, 3).float()
    weight = torch.ones(3)
    fn = TRANSFORMS[name](model, loss(weight=weight, reduction="sum"))
    for scale in (1.0, 3.0):
        weight.fill_(scale)
        for _ in range(4):
            got = fn(params, x, y)
        fresh = TRANSFORMS[name](model, loss(weight=weight, reduction="sum"))(params, x, y)
        for a, b in zip(tree_leaves(got), tree_leaves(fresh), strict=True):
            torch.testing.assert_close(a, b)
    assert graphs(fn)


@pytest.mark.parametrize(("loss", "setting"), [(F.cross_entropy, "label_smoothing"), (F.huber_loss, "delta")])
def test_settings_that_are_tensors_are_left(loss, setting):
    model, params, x, y = mlp()
    y, value = (y if loss is F.cross_entropy else torch.randn(len(x), 3)), torch.tensor(0.1)
    fn = pexgrad.per_example_grad(model, functools.partial(loss, **{setting: value}))
    for number in (0.1, 0.6):
        value.fill_(number)
        for _ in range(4):
            got = fn(params, x, y)
        assert_rows_equal(got, rows_of(model, functools.partial(loss, **{setting: number}), x, y))
    assert not graphs(fn)


class Scaled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            return 3 * found
        # an example of it is of that kind too
        return found.as_subclass(cls) if func is torch.Tensor.__getitem__ else found


def test_tensors_of_a_special_kind_are_left():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, in_module)
    for _ in range(4):
        want = fn(params, x, y)
    got = fn(params, x, y.as_subclass(Scaled))
    for k, r in want.items():
        torch.testing.assert_close(got[k], 3 * r)


def test_targets_that_hold_more_than_a_tensor_are_left():
    model, params, x, y = mlp()
    scale = Mutable(1.0)
    fn = pexgrad.per_example_grad(model, lambda o, y: F.cross_entropy(o, y[0], reduction="none") * y[1].mean)
    for _ in range(4):
        want = fn(params, x, (y, scale))
    scale.mean = 5.0
    got = fn(params, x, (y, scale))
    for k, r in want.items():
        torch.testing.assert_close(got[k], 5 * r)


class Mutable:
    def __init__(self, mean):
        self.mean = mean


def test_random_numbers_are_drawn_as_before():
    model, _, x, y = mlp()
    model = nn.Sequential(*model, nn.Dropout(0.5))
    fn, fresh = pexgrad.per_example_grad(model), pexgrad.per_example_grad(model)
    torch.manual_seed(0)
    answers = [fn(named(model), x, y) for _ in range(4)]
    torch.manual_seed(0)
    for a in answers:
        assert same_bits(fresh(named(model), x, y), a)
    assert not graphs(fn)


@pytest.mark.parametrize(
    "options",
    [{"create_graph": True}, {"chunk_size": 2}, {"strategy": "multi"}, {"strategy": "naive"}],
    ids=str,
)
def test_what_has_no_graph(options):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model, **options)
    for _ in range(3):
        assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    assert not graphs(fn)


def conv_net():
    layers = (
        nn.Conv2d(4, 8, 3, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 1, groups=2),
    )
    model = nn.Sequential(*layers, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3))
    return model, named(model), torch.randn(4, 4, 5, 5), torch.tensor([0, 2, 1, 1])


@pytest.mark.parametrize(
    ("name", "conv_rule"),
    [
        *((name, "auto") for name in TRANSFORMS),
        *((name, rule) for name in ("rows", "clipped") for rule in ("measure", "loop", "unfold", "grouped")),
    ],
)
def test_convolutions_keep_their_algorithm(name, conv_rule):
    model, params, x, y = conv_net()
    fn = TRANSFORMS[name](model, conv_rule=conv_rule)
    for b in (4, 1):
        answers = [fn(params, x[:b], y[:b]) for _ in range(4)]
        assert all(same_bits(a, answers[0]) for a in answers)
    assert len(graphs(fn)) == 2


def test_windows_of_a_few_examples_at_a_time(monkeypatch):
    monkeypatch.setattr(_base, "PIECE_BYTES", 20_000)
    model, params, x, y = conv_net()
    fn = pexgrad.per_example_grad(model, conv_rule="unfold")
    want = fn(params, x, y)
    assert all(same_bits(fn(params, x, y), want) for _ in range(3))
    ((graph, *more),) = [graphs(fn)]
    assert not more and any(n.target is torch.ops.aten.cat.default for n in graph.module.graph.nodes)


@pytest.mark.parametrize("lie", [
    lambda x: x.to(memory_format=torch.channels_last), lambda x: x.mT.contiguous().mT, lambda x: x[:1].expand(4, -1, -1, -1),
    lambda x: x.flip(0), lambda x: torch.cat([x, x], 3)[..., ::2],
])  # fmt: skip
def test_images_that_lie_otherwise_in_memory(lie):
    model, params, x, y = conv_net()
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        fn(params, x, y)
    assert graphs(fn)
    params = {k: p.mT.contiguous().mT if p.dim() > 1 else p for k, p in params.items()}
    assert_rows_equal(fn(params, lie(x), y), rows_of(model, F.cross_entropy, lie(x), y))


def test_inputs_are_not_written_to():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.ReLU(inplace=True))
    params, x, y = named(model), torch.randn(4, 4), torch.tensor([0, 2, 1, 1])
    fn, before = pexgrad.per_example_grad(model), x.clone()
    for _ in range(4):
        fn(params, x, y)
    assert graphs(fn) and torch.equal(x, before)


@pytest.mark.parametrize("name", ["rows", "norm", "clipped"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind, name):
    layer = kind(4, 3, bidirectional=kind is nn.LSTM, batch_first=True)
    model = Net(lambda s, x: s.layer(x)[0][:, -1], layer=layer)
    params, x, y = named(model), torch.randn(4, 3, 4), torch.tensor([0, 2, 1, 1])
    fn = TRANSFORMS[name](model)
    answers = [fn(params, x, y) for _ in range(4)]
    assert all(same_bits(a, answers[0]) for a in answers)
    assert graphs(fn)


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_embeddings(options):
    model = Net(
        lambda s, x: s.out(s.table(x).mean(1)), table=nn.Embedding(7, 4, **options), out=nn.Linear(4, 3)
    )
    params, x, y = named(model), torch.randint(7, (4, 5)), torch.tensor([0, 2, 1, 1])
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        fn(params, x, y)
    ((graph, *more),) = [graphs(fn)]
    targets = {n.target for n in graph.module.graph.nodes}
    assert (
        not more
        and torch.ops.aten.index_add_.default in targets
        and torch.ops.aten.index_add.default not in targets
    )
    x = x.flip(0) // 2  # other ids, one more often
    for _ in range(2):
        assert_rows_equal(fn(params, x, y), rows_of(model, F.cross_entropy, x, y))
    with pytest.raises(IndexError, match="out of range"):
        fn(params, x + 7, y)
    norm = pexgrad.per_example_grad_norm(model)
    for _ in range(4):
        assert_rows_equal(
            {"": norm(params, x, y)}, {"": pexgrad.rows.norms(rows_of(model, F.cross_entropy, x, y))}
        )


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomalies_are_still_detected():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    for _ in range(4):
        fn(params, x, y)
    assert graphs(fn)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
        fn(params, x * float("nan"), y)


def test_longer_graphs_wait_for_longer(monkeypatch):
    model, params, x, y = conv_net()
    monkeypatch.setattr(repeats, "LONG", 10)
    fn = pexgrad.per_example_grad(model)
    seen = [(fn(params, x, y), len(graphs(fn)))[1] for _ in range(5)]
    assert seen == [0, 0, 0, 1, 1]


def test_calls_of_much_arithmetic_are_left(monkeypatch):
    model, params, x, y = conv_net()
    monkeypatch.setattr(repeats, "WORTHWHILE", 0.0)
    fn = pexgrad.per_example_grad(model)
    for _ in range(4):
        fn(params, x, y)
    assert not graphs(fn)


def test_large_calls_and_slower_graphs_are_left(monkeypatch):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    monkeypatch.setattr(repeats, "_seconds", lambda *_: float("inf"))
    for _ in range(3):
        fn(params, x, y)
    assert not graphs(fn)
    monkeypatch.undo()
    monkeypatch.setattr(repeats, "OFTEN", 1)
    monkeypatch.setattr(repeats, "SMALL", 8 * 4 * sum(p.numel() for p in params.values()) - 1)
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        fn(params, x, y)
    assert not fn._graphs.repeats._known


def test_what_fails_in_a_graph_is_answered_without_one(monkeypatch):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    want = fn(params, x, y)
    monkeypatch.setattr(transform, "lower_doubting", None)
    assert all(same_bits(fn(params, x, y), want) for _ in range(3))
    assert not graphs(fn)


@pytest.mark.parametrize("name", ["rows", "value_and_grad"])
@each(pick("layer_norm tied_embedding_and_head relu_and_residual_in_place frozen_backbone"))
def test_rows_in_buffers(case, name):
    model, x, y, loss = case.build()
    params, fn = named(model), TRANSFORMS[name](model, loss)

    def rows(answer):
        return answer if name == "rows" else answer[1]

    want = fn(params, x, y)
    for _ in range(4):
        buffers = {k: torch.full((len(r) + 1, *r.shape[1:]), float("nan")) for k, r in rows(want).items()}
        got = fn(params, x, y, out=buffers)
        assert same_bits(got, want)
        assert all(rows(got)[k].data_ptr() == b.data_ptr() for k, b in buffers.items())
        assert all(b[-1].isnan().all() for b in buffers.values())


def test_a_graph_that_is_wrong_leaves_the_buffers_alone(monkeypatch):
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    want = fn(params, x, y)
    run = repeats._run
    monkeypatch.setattr(repeats, "_run", lambda *args: {k: r.add_(1) for k, r in run(*args).items()})
    for _ in range(3):
        buffers = {k: torch.full_like(r, float("nan")) for k, r in want.items()}
        assert same_bits(fn(params, x, y, out=buffers), want)
    assert not graphs(fn)


def test_buffers_of_any_strides():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    want = fn(params, x, y)
    for _ in range(4):
        buffers = {
            k: torch.full_like(r, float("nan")).mT.contiguous().mT if r.dim() > 2 else r + 1
            for k, r in want.items()
        }
        got = fn(params, x, y, out=buffers)
        assert same_bits(got, want) and same_bits(buffers, want)
    assert len(graphs(fn)) == 1


def test_bad_targets_raise_what_they_raise():
    model, params, x, y = mlp()
    fn = pexgrad.per_example_grad(model)
    for _ in range(3):
        want = fn(params, x, y)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        fn(params, x, y + 7)
    assert same_bits(fn(params, x, y), want)
