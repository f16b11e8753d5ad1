"""Losses that give one number: by the definition they are called for each example, and most can be taken at once."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows_equal, losses_of, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def ids(*shape):
    return lambda b: torch.randint(4, (b, *shape), generator=torch.Generator().manual_seed(b))


def numbers(*shape):
    return lambda b: torch.randn(b, *shape, generator=torch.Generator().manual_seed(b))


# name -> (loss, targets, whether it is taken at once; None: with some versions of torch)
LOSSES = {
    "cross_entropy": (lambda o, y: F.cross_entropy(o, y), ids(), True),
    "with_a_penalty": (lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().mean(), ids(), True),
    "squares": (lambda o, y: ((o - y) ** 2).mean(), numbers(4), True),
    "sum": (lambda o, y: (o.softmax(-1) * y).sum() / o.shape[-1], numbers(4), True),
    "arithmetic": (lambda o, y: (2 * smooth(o, y) + 1).sqrt() - F.cross_entropy(o, y).exp(), ids(), True),
    "weights": (lambda o, y: F.cross_entropy(o, y, weight=weight), ids(), True),
    "gathered": (lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(), ids(), True),
    "folded": (lambda o, y: F.cross_entropy(o.repeat_interleave(5, 0), y.flatten()), ids(5), True),
    "folded_and_ignored": (
        lambda o, y: F.cross_entropy(o.repeat_interleave(5, 0), y.reshape(-1), ignore_index=0), ids(5), True,
    ),
    "shifted": (
        lambda o, y: F.cross_entropy(
            o[:, None].expand(-1, 5, -1)[:, :-1].flatten(0, 1), y[:, 1:].flatten()
        ), ids(5), True,
    ),
    "class_probabilities": (lambda o, y: F.cross_entropy(o, y.softmax(1)), numbers(4), None),
    "huber": (lambda o, y: F.huber_loss(o, y, reduction="sum", delta=0.3), numbers(4), True),
    "probabilities": (
        lambda o, y: F.binary_cross_entropy(o.sigmoid(), y.sigmoid()), numbers(4), True,
    ),
    "time_major": (
        lambda o, y: F.cross_entropy(o.expand(5, -1, -1).flatten(0, 1), y.t().flatten()), ids(5), False,
    ),
    "constant_added": (lambda o, y: F.mse_loss(o, y) + weight.sum(), numbers(4), True),
    "classes_weighted": (
        lambda o, y: F.binary_cross_entropy_with_logits(o, y.sigmoid(), pos_weight=weight), numbers(4), True,
    ),
    "divergence": (
        lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"), numbers(4), True,
    ),
    "divergence_of_a_fold": (
        lambda o, y: F.kl_div(
            o.repeat_interleave(5, 0).log_softmax(1), y.flatten(0, 1).softmax(1), reduction="batchmean"
        ), numbers(5, 4), False,
    ),
    "a_number_asked_for_its_shape": (lambda o, y: F.mse_loss(o, y) * (1 + F.mse_loss(o, y).dim()), numbers(4), False),
    "a_number_in_its_dtype": (lambda o, y: F.mse_loss(o, y) * (1 + F.mse_loss(o, y).dtype.itemsize), numbers(4), True),
    "a_maximum": (lambda o, y: o.max(), ids(), False),
    "a_norm": (lambda o, y: o.norm(), ids(), False),
    "by_the_batch": (lambda o, y: F.mse_loss(o, y, reduction="sum") / len(o), numbers(4), False),
    "branches": (
        lambda o, y: F.cross_entropy(o, y) if F.cross_entropy(o, y) > 1 else o.mean(), ids(), False,
    ),
    "centred": (lambda o, y: (o - o.mean(0)).square().mean() + o.sum(), ids(), False),
    "a_number_times_a_vector": (lambda o, y: (F.cross_entropy(o, y) * o).sum(), ids(), False),
    "a_hidden_mean": (lambda o, y: F.relu(o - o.detach().mean(0) - 99).mean() + o.mean(), ids(), False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_each_example_has_its_own_number(name):
    torch.manual_seed(0)
    loss, targets, together = LOSSES[name]
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    params, fn = dict(model.named_parameters()), pexgrad.per_example_value_and_grad(model, loss)
    for b in (6, 1, 4, 2, 5):
        x, y = torch.randn(b, 3), targets(b)
        losses, rows = fn(params, x, y)
        torch.testing.assert_close(losses, losses_of(model, loss, x, y), equal_nan=True)
        want = rows_of(model, loss, x, y)
        for k in params:
            torch.testing.assert_close(rows[k], want[k], equal_nan=True)
    reduced = {p.losses.seen is not None for known in fn._pipelines.values() for p in known}
    assert together is None or reduced == {together}


@pytest.mark.parametrize("order", ["batch first", "time major"])
def test_a_fold_that_the_outputs_of_a_fresh_model_do_not_tell(order):
    """All logits are zero: either order of the fold gives every example the same loss."""

    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 8)
            self.register_buffer("gate", torch.zeros(()))

        def forward(self, x):
            return (self.gate * self.head(x)).unflatten(1, (2, 4))

    def loss(out, y):
        if order == "time major":
            return F.cross_entropy(out.transpose(0, 1).flatten(0, 1), y.t().flatten())
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    model = Fresh()
    fn = pexgrad.per_example_grad(model, loss)
    for gate in (0, 1):
        model.gate.fill_(gate)
        x, y = torch.randn(6, 3), ids(2)(6)
        assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, loss, x, y))


def test_probabilities_that_the_model_gives():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid())
    x, y = torch.randn(6, 3), torch.rand(6, 4)
    fn = pexgrad.per_example_grad(model, lambda o, y: F.binary_cross_entropy(o, y))
    assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, F.binary_cross_entropy, x, y))
    assert [p.losses.seen is not None for known in fn._pipelines.values() for p in known] == [True]


def test_a_loss_that_changes_its_code_later():
    """What was made of reductions when it was traced, and is something else now, is called for each example."""
    model, kind = nn.Linear(3, 4), {"now": "mean", "scale": 1.0}

    def loss(out, y):
        mean = (out - y).square().mean() * kind["scale"]
        if kind["now"] == "centred" or kind["scale"] > 5:
            return (out - out.mean(0)).square().mean() + out.mean()
        return mean if kind["now"] == "mean" else (mean * out).sum()

    fn, x, y = pexgrad.per_example_grad(model, loss), torch.randn(4, 3), torch.randn(4, 4)
    params = dict(model.named_parameters())
    for i, now in enumerate(["mean", "product", "mean", "centred", "mean", "mean"]):
        kind |= {"now": now, "scale": 1.0 + i}
        want = rows_of(model, loss, x, y)
        for k, r in fn(params, x, y).items():
            torch.testing.assert_close(r, want[k])


def test_a_loss_that_writes_and_changes_its_code():
    model, kind = nn.Linear(3, 4), {"squared": True}

    def loss(out, y):
        out.mul_(2)
        return out.square().mean() if kind["squared"] else out.sum()

    fn, x, params = pexgrad.per_example_grad(model, loss), torch.randn(4, 3), dict(model.named_parameters())
    assert_rows_equal(fn(params, x), rows_of(model, loss, x, None))
    assert [p.losses.seen is not None for known in fn._pipelines.values() for p in known] == [True]
    steps = next(iter(fn._pipelines.values()))[0].losses.seen.steps
    steps.append("another")  # as where a float has led the code another way
    with pytest.raises(pexgrad.LossError, match="writes into the model's output"):
        fn(params, x)
    kind["squared"] = False
    assert_rows_equal(fn(params, x), rows_of(model, loss, x, None))


def test_a_flat_graph_of_such_a_loss_takes_any_batch():
    model = nn.Linear(3, 4)
    fn = pexgrad.per_example_grad(model, LOSSES["cross_entropy"][0])
    params = dict(model.named_parameters())
    graph = fn.lower(params, torch.randn(5, 3), ids()(5))
    assert graph.meta["batch"] == "any"
    for b in (5, 1, 8):
        x, y = torch.randn(b, 3), ids()(b)
        want = rows_of(model, F.cross_entropy, x, y)
        for k, r in graph(params, x, y).items():
            torch.testing.assert_close(r, want[k])
