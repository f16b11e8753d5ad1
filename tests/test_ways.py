"""Losses (B,) whose code goes another way at a later call."""

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows_equal, rows_of

import pexgrad
from pexgrad.losses.branches import Branch, Branches

pytestmark = pytest.mark.usefixtures("double")


def batch(b):
    return torch.randn(b, 3), torch.randint(4, (b,))


def setting(loss):
    """A function of rows for a loss that reads `kind`, which may be changed, and its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    return model, pexgrad.per_example_grad(model, loss), dict(model.named_parameters())


def apart(o, y):
    return F.cross_entropy(o, y, reduction="none")


def relative(o, y):
    losses = apart(o, y)
    return losses - losses.mean()


def test_another_code():
    kind = {"now": "apart"}

    def loss(o, y):
        if kind["now"] == "relative":
            return relative(o, y)
        return apart(o, y) if kind["now"] == "apart" else (o - 1).square()

    model, fn, params = setting(loss)
    for b, now in ((5, "apart"), (5, "squares"), (7, "apart"), (3, "squares")):
        kind["now"], (x, y) = now, batch(b)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    kind["now"] = "relative"
    for _ in range(2):
        with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
            fn(params, *batch(5))
    assert fn.trace_count == 1


@pytest.mark.parametrize("verify", [True, False])
def test_what_may_mix_later_is_called_for_each_example(verify):
    """At first it is refused, unless `verify=False` says that it never has an effect."""
    kind = {"now": "apart"}

    def loss(o, y):
        losses = apart(o, y)
        return losses if kind["now"] == "apart" else losses + (losses.mean() - kind["limit"]).clamp(min=0)

    model, _, params = setting(loss)
    fn = pexgrad.per_example_grad(model, loss, verify=verify)
    x, y = batch(5)
    fn(params, x, y)
    kind |= {"now": "relative later", "limit": 99.0}
    assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    if verify:
        with pytest.raises(pexgrad.MixedExamplesError, match="looks at all examples"):
            pexgrad.per_example_grad(model, loss)(params, x, y)
    kind["limit"] = 1.0
    assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))


COUNTED = {
    "counted": lambda o, y: (y == y[0]).double().mean(),
    "of the outputs": lambda o, y: o.detach().abs().mean(),
    "by numpy": lambda o, y: float(np.mean(y.numpy())),
    "of each": lambda o, y: torch.bincount(y, minlength=4).double()[y],
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("weight", COUNTED)
def test_a_weight_counted_in_the_batch_later(weight, graph):
    """What autograd records is the same."""
    kind = {"weight": lambda o, y: 0.5}

    def loss(o, y):
        if not graph:
            o.detach().numpy()
        return apart(o, y) * kind["weight"](o, y)

    model, fn, params = setting(loss)
    fn(params, *batch(5))
    kind["weight"] = COUNTED[weight]
    x, y = torch.randn(5, 3), torch.tensor([2, 1, 1, 3, 2])
    for _ in range(2):
        with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
            fn(params, x, y)
    kind["weight"] = lambda o, y: 0.25
    assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    assert fn.trace_count == 1


def test_another_function_with_the_same_name():
    kind = {"loss": apart}
    model, fn, params = setting(lambda o, y: kind["loss"](o, y))
    x, y = batch(5)
    assert_rows_equal(fn(params, x, y), rows_of(model, apart, x, y))
    kind["loss"] = relative
    with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
        fn(params, x, y)


@pytest.mark.parametrize("last", [6, 6.0])
@pytest.mark.parametrize("verify", [True, False])
def test_a_number_that_leads_the_code_another_way(last, verify):
    kind = {"epoch": type(last)(0)}

    def loss(o, y):
        return relative(o, y) if kind["epoch"] > 5 else apart(o, y)

    model, _, params = setting(loss)
    fn = pexgrad.per_example_grad(model, loss, verify=verify)
    for b, epoch in ((5, 0), (5, 1), (7, 2)):
        kind["epoch"], (x, y) = type(last)(epoch), batch(b)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    assert fn.trace_count == 1
    kind["epoch"] = last
    for _ in range(2):
        with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
            fn(params, *batch(9))
    kind["epoch"] = type(last)(3)
    assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))


@pytest.mark.parametrize("of", [int, float])
def test_numbers_that_grow(of):
    """A coefficient, a counter, or a record of them leads to no new trace."""

    class Annealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.drop, self.history, self.last = of(0), nn.Dropout(0.0), [], None

        def forward(self, o, y):
            o.mul_(2)  # the loss may write into the output, and is called for a few examples more
            self.history.append(self.step)
            self.last = o.detach()
            return apart(self.drop(o), y) + self.step / 1000 * o.square().sum(1)

    loss = Annealed()
    model, fn, params = setting(loss)
    for step, b in enumerate((5, 5, 7, 7, 2)):
        loss.step, (x, y) = of(step), batch(b)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    assert fn.trace_count == 1


def test_masks_that_a_loss_draws_do_not_tell():
    kind = {"scale": 1.0}
    model, fn, params = setting(lambda o, y: kind["scale"] * apart(F.dropout(o, 0.5), y))
    x, y = batch(6)
    for scale in (1.0, 2.0, 3.0):
        kind["scale"] = scale
        torch.manual_seed(1)
        rows = fn(params, x, y)
        torch.manual_seed(1)
        masked = scale * apart(F.dropout(model(x), 0.5), y)
        (first,) = torch.autograd.grad(masked[0], params["0.bias"])
        torch.testing.assert_close(rows["0.bias"][0], first)


def test_a_size_at_which_the_code_does_something_else():
    model, fn, params = setting(lambda o, y: relative(o, y) if len(o) > 5000 else apart(o, y))
    for b in (4, 4096, 5000):
        x, y = batch(b)
        rows = fn(params, x, y)
        assert_rows_equal({k: r[:3] for k, r in rows.items()}, rows_of(model, apart, x[:3], y[:3]))
    for _ in range(2):
        with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
            fn(params, *batch(5001))


def test_a_loss_without_a_graph_is_compared_at_every_size():
    def loss(o, y):
        losses = torch.stack([F.cross_entropy(o[b : b + 1], y[b : b + 1]) for b in range(len(y))])
        return losses - losses.mean() if int(y.sum()) >= 4 * 3 else losses

    model, fn, params = setting(loss)
    x = torch.randn(12, 3)
    for b in (2, 3, 4):
        y = torch.zeros(b, dtype=torch.long)
        assert_rows_equal(fn(params, x[:b], y), rows_of(model, loss, x[:b], y))
    with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
        fn(params, x, torch.full((12,), 1))


def test_in_flat_graphs():
    kind = {"now": "apart"}

    def loss(o, y):
        return (
            relative(o, y)
            if kind["now"] == "relative"
            else apart(o, y)
            if kind["now"] == "apart"
            else o.square()
        )

    model, fn, params = setting(loss)
    x, y = batch(5)
    for now in ("apart", "squares"):
        kind["now"] = now
        assert_rows_equal(fn.lower(params, x, y)(params, x, y), rows_of(model, loss, x, y))
    kind["now"] = "relative"
    with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
        fn.lower(params, x, y)


def test_a_limit_that_a_number_moves():
    kind = {"limit": 5000}
    model, fn, params = setting(lambda o, y: relative(o, y) if len(o) > kind["limit"] else apart(o, y))
    x, y = batch(20)
    assert_rows_equal(fn(params, x, y), rows_of(model, apart, x, y))
    kind["limit"] = 10
    assert_rows_equal(fn(params, x[:8], y[:8]), rows_of(model, apart, x[:8], y[:8]))
    with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
        fn(params, x, y)


def test_a_counter_in_a_tensor():
    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, o, y):
            return apart(o, y) if self.step < 3 else relative(o, y)

    loss = Scheduled()
    model, fn, params = setting(loss)
    x, y = batch(6)
    for _ in range(3):
        assert_rows_equal(fn(params, x, y), rows_of(model, apart, x, y))
        loss.step += 1
    with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
        fn(params, x, y)


def test_another_dimension():
    """The same operations along another dimension."""
    kind = {"dim": 1}
    _, fn, params = setting(lambda o, y: apart(o, y) + o.softmax(kind["dim"])[:, 0])
    x, y = batch(4)  # as many examples as there are classes
    fn(params, x, y)
    kind["dim"] = 0
    with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
        fn(params, x, y)


def test_a_loss_is_called_once_for_a_call():
    class Counting:
        def __init__(self):
            self.calls, self.names = 0, []

        def __call__(self, o, y):
            self.calls += 1
            self.names.append(f"call {self.calls}")
            return apart(o, y)

    loss = Counting()
    _, fn, params = setting(loss)
    fn(params, *batch(5))
    before = loss.calls
    for b in (5, 7, 7, 4, 9):
        fn(params, *batch(b))
    assert loss.calls == before + 5 and fn.trace_count == 1


@pytest.fixture
def single():
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_that_are_zero_but_for_rounding(dtype, single):
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    x = torch.randn(20, 64, dtype=dtype)
    y = model(x).detach()
    loss = lambda o, y: 1 - F.cosine_similarity(o, y)  # noqa: E731
    fn = pexgrad.per_example_value_and_grad(model, loss)
    losses, _ = fn(dict(model.named_parameters()), x, y)
    assert losses.abs().max() < 1e-6


def test_what_is_known_stays_within_bounds():
    """The operations of a loss may be those of the classes that are there, other ones in each batch."""
    known = Branches(None, noting=False)
    known.keep(("first",), Branch(None), 4)
    for i in range(1000):
        known.keep((i,), Branch(None), 5)
        assert known.get((i,)).covers(5) and len(known._known) <= 256
    assert known.get(("first",)) is None and known.largest == 5


def test_a_flat_graph_of_a_loss_that_asks_for_the_number_of_examples():
    def loss(o, y):
        return apart(o, y).reshape(len(y), 1)

    model, fn, params = setting(loss)
    graph = fn.lower(params, *batch(5))
    assert graph.meta["batch"] == "any"
    for b in (5, 1, 8):
        x, y = batch(b)
        assert_rows_equal(graph(params, x, y), rows_of(model, loss, x, y))


@pytest.mark.parametrize(
    "read",
    [
        lambda o, y: float(o.detach().abs().max()) > 5,
        lambda o, y: (o.detach().abs() > 5).any(),
        lambda o, y: y.max().item() > 2,
        lambda o, y: max(y.tolist()) > 2,
        lambda o, y: not torch.equal(y.clamp(max=2), y),
    ],
    ids=["output", "condition", "targets", "list", "comparison"],
)
def test_a_number_read_from_the_batch(read):
    """It may be another for each example, at sizes of batches that are known by then too."""
    model, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.zeros(6, dtype=torch.long)

    def loss(o, y):
        return apart(o, y) * (2 if read(o, y) else 1)

    fn = pexgrad.per_example_grad(model, loss)
    for large in (False, False, True, False):
        inputs, targets = x.clone(), y.clone()
        if large:
            inputs[2], targets[2] = 100, 3
            with pytest.raises(pexgrad.MixedExamplesError, match="of a batch"):
                fn(dict(model.named_parameters()), inputs, targets)
            inputs, targets = inputs[2:3].repeat(6, 1), targets[2:3].repeat(6)  # for which it is the same
        rows = fn(dict(model.named_parameters()), inputs, targets)
        assert_rows_equal(rows, rows_of(model, loss, inputs, targets))


def test_a_number_read_from_a_constant_is_one_for_all():
    calls, weight = [], torch.tensor([1.0, 2.0])
    model, (x, y) = nn.Linear(3, 4), batch(6)

    def loss(o, y):
        calls.append(len(o))
        return apart(o, y) * weight.sum().item()

    fn = pexgrad.per_example_grad(model, loss)
    fn(dict(model.named_parameters()), x, y)
    calls.clear()
    assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, loss, x, y))
    assert calls[:1] == [6], "called for the batch"
