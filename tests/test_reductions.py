"""Losses that give one number: by the definition they are called for each example, and most can be taken at once."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows_equal, losses_of, rows_of

import pexgrad
from pexgrad.losses.reduced import Reduced

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
    "a_maximum": (lambda o, y: o.max() - torch.min(o), ids(), True),
    "equal_maxima": (lambda o, y: F.relu(o).max() + F.relu(o).min() + (o > 0).float().amax(), ids(), True),
    "norms": (lambda o, y: o.norm() + torch.norm(o, p=1) + o.norm(3) + torch.linalg.norm(o), ids(), True),
    "moments": (lambda o, y: o.std() + torch.var(o) + o.prod(), ids(), True),
    "a_maximum_of_a_fold": (
        lambda o, y: o[:, None].mul(1 + torch.arange(5)[:, None]).flatten(0, 1).max() + y.sum(), numbers(5), True,
    ),
    "by_place": (lambda o, y: -o.log_softmax(1)[torch.arange(len(y)), y].mean(), ids(), True),
    "by_place_times_place": (lambda o, y: (o * torch.arange(1, len(y) + 1)[:, None]).mean(), ids(), False),
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
    "distribution": (
        lambda o, y: -(torch.distributions.Categorical(logits=o).log_prob(y) * y).mean(), ids(), True,
    ),
    "entropy": (
        lambda o, y: torch.distributions.Normal(o, 1 + y.square()).entropy().sum()
        - torch.distributions.Normal(o, 1 + y.square()).log_prob(y).mean(), numbers(4), True,
    ),
    "margins": (lambda o, y: F.multi_margin_loss(o, y, margin=0.3), ids(), True),
    "triplets": (lambda o, y: F.triplet_margin_loss(o, y, y.flip(1), reduction="sum"), numbers(4), True),
    "gaussian": (lambda o, y: F.gaussian_nll_loss(o, y, o.square() + 1), numbers(4), False),
    "along_what_is_left": (
        lambda o, y: (o - y).square().sum(1).mean(0) + torch.sum(o[:, 0], dim=0) - o[:, 1].mean(dim=-1), numbers(4), True,
    ),
    "a_number_asked_for_its_shape": (lambda o, y: F.mse_loss(o, y) * (1 + F.mse_loss(o, y).dim()), numbers(4), False),
    "a_number_in_its_dtype": (lambda o, y: F.mse_loss(o, y) * (1 + F.mse_loss(o, y).dtype.itemsize), numbers(4), True),
    "without_correction": (lambda o, y: o.std(unbiased=False) + o.var(correction=0), ids(), False),
    "a_median": (lambda o, y: o.median(), ids(), False),
    "by_the_batch": (lambda o, y: F.mse_loss(o, y, reduction="sum") / len(o), numbers(4), True),
    "by_all_numbers": (lambda o, y: (o - y).abs().sum() / o.numel() + o.mean() ** y.shape[0], numbers(4), True),
    "by_the_size_of_a_fold": (
        lambda o, y: F.cross_entropy(o.repeat_interleave(5, 0), y.flatten(), reduction="sum") / y.numel() + y.size(0),
        ids(5), True,
    ),
    "by_a_part_of_the_size": (lambda o, y: (o - y).abs().sum() * (3 / o.numel()), numbers(4), False),
    "a_size_among_numbers": (lambda o, y: (o * len(o)).mean(), numbers(4), False),
    "branches_by_size": (lambda o, y: (o - y).mean() / (len(o) if len(o) > 2 else 7), numbers(4), False),
    "branches": (
        lambda o, y: F.cross_entropy(o, y) if F.cross_entropy(o, y) > 1 else o.mean(), ids(), False,
    ),
    "centred": (lambda o, y: (o - o.mean(0)).square().mean() + o.sum(), ids(), False),
    "a_number_times_a_vector": (lambda o, y: (F.cross_entropy(o, y) * o).sum(), ids(), True),
    "a_number_times_a_fold": (lambda o, y: (o.mean() * o.repeat_interleave(5, 0) * y.flatten()[:, None]).sum(), ids(5), False),
    "centred_alone": (lambda o, y: (o - y).square().sum() / (y - y.mean()).square().sum(), numbers(4), True),
    "of_two_terms": (
        lambda o, y: torch.stack([F.mse_loss(o, y), F.l1_loss(o, y)]).sum() + torch.stack([o.mean(), y.mean()]).norm(),
        numbers(4), True,
    ),
    "the_larger": (
        lambda o, y: torch.maximum(F.mse_loss(o, y), o.abs().mean()) + torch.min(o.mean(), y.mean()), numbers(4), True,
    ),
    "one_of_two_terms": (lambda o, y: torch.stack([F.mse_loss(o, y), F.l1_loss(o, y)])[1], numbers(4), False),
    "chosen": (lambda o, y: torch.where(o.mean() > y.mean(), o.sum().sin(), o.prod().detach() * o.std()), numbers(4), True),
    "decibels": (lambda o, y: -10 * torch.log10(F.mse_loss(o, y)) + (o.sum() / 9).atan2(y.sum()), numbers(4), True),
    "without_nan": (
        lambda o, y: (o / y.relu().sign()).sub(9).nan_to_num(posinf=torch.nan).sub(9).sqrt().nansum()
        + o.where(y > 0, torch.nan).nanmean() / torch.count_nonzero(y > 9).add(1), numbers(4), True,
    ),
    "logarithm_of_all": (lambda o, y: torch.logsumexp((o - y).flatten(), 0) + (o * y).view(-1).logsumexp(-1), numbers(4), True),
    "products": (lambda o, y: torch.dot(o.flatten(), y.flatten()) + torch.dist(o, y) + torch.dist(o, y, p=1), numbers(4), True),
    "distances": (
        lambda o, y: torch.cdist(o.view(-1, 2, 2), y).min(-1).values.mean() + F.pairwise_distance(o, y[:, :2].flatten(1)).mean(),
        numbers(3, 2), True,
    ),
    "spectra": (
        lambda o, y: (torch.fft.rfft(o).abs() - torch.fft.rfft(y).abs()).abs().mean() + torch.fft.fft(o).real.square().sum(),
        numbers(4), True,
    ),
    "windows": (
        lambda o, y: F.avg_pool2d(o.view(-1, 1, 2, 2), 2, 1).square().sum()
        + F.conv1d(o[:, None], torch.ones(2, 1, 3)).sin().mean() - F.max_pool1d(o[:, None], 2).mean(), numbers(4), True,
    ),
    "a_kernel_of_the_examples": (lambda o, y: F.conv1d(o[None], o[:, None, :2], groups=len(o)).square().mean(), ids(), False),
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
    reduced = {isinstance(p.losses.by_batch, Reduced) for p in fn._traces}
    assert together is None or reduced == {together}


# terms that weigh nothing at first; and what they are added to
HIDDEN = {
    "time_major": lambda o, y: F.cross_entropy(o.transpose(0, 1).flatten(0, 1), y.t().flatten()),
    "time_major_norm": lambda o, y: o.transpose(0, 1).flatten(0, 1).norm(),
    "time_major_maximum": lambda o, y: o.transpose(0, 1).flatten(0, 1).max(),
    "halves": lambda o, y: torch.cat([o[:, 0], o[:, 1]]).norm(),
    "repeated": lambda o, y: (o[:, 0].repeat(3, 1) * torch.arange(4)).square().mean(),
    "normalised_over_the_batch": lambda o, y: (F.layer_norm(o, o.shape) * o).mean(),
    "turned": lambda o, y: o[torch.arange(len(o)).flip(0)].square().mean(),
    "shuffled": lambda o, y: o[torch.randperm(len(o))].square().mean(),
    "along_the_batch": lambda o, y: F.avg_pool1d(o[:, 0].t(), 3, 1, 1).t().square().mean(),
    "of_the_size": lambda o, y: o.sum() / torch.ones(len(o)).norm(),
    "of_zeros": lambda o, y: o.sum() * torch.zeros(len(o)).logsumexp(0),
    "floored_size": lambda o, y: o.abs().sum() / max(len(o), 2),
    "size_by_branch": lambda o, y: o.abs().sum() / (len(o) if len(o) > 1 else 7),
    "one_size": lambda o, y: o.square().mean() * (1.0 if len(o) == 128 else 0.5),
    "without_correction": lambda o, y: o.var(unbiased=False),
    "dimensions": lambda o, y: o.square().mean() * (1 + o.mean().ndim),
    "spectrum_along_the_batch": lambda o, y: torch.fft.fft(o[:, 0], dim=0).abs().mean(),
    "distances_in_the_batch": lambda o, y: torch.cdist(o[:, 0], o[:, 1]).mean(),
    "distances_to_the_first": lambda o, y: F.pairwise_distance(o[:, 0], o[:1, 0]).mean(),
    "windows_over_the_batch": lambda o, y: F.avg_pool2d(o.transpose(0, 1)[None], 3, 1, 1).square().mean(),
    "windows_over_one_image": lambda o, y: F.conv1d(o[:, 0], torch.ones(1, len(o), 1)).square().mean(),
    "stacked_and_cut": lambda o, y: (
        torch.stack([o.mean(), o.std()])[:1].sum() + torch.stack([o.mean(), o.std()])[0]
    ),
    "beside_the_turned": lambda o, y: (o.mean() * o[:, 0].t()).square().mean(),
    "beside_fewer_dimensions": lambda o, y: (
        (o.mean() * o[:, 0, 0]).square().mean() + (o[:, 0] * o.mean() + o[:, 0, 0].mean()).mean()
    ),
    "triplets": lambda o, y: F.triplet_margin_loss(
        o.transpose(0, 1).flatten(0, 1), o.flatten(0, 1), -o.flatten(0, 1)
    ),
}


@pytest.mark.parametrize("how", ["coefficient", "clamp"])
@pytest.mark.parametrize("name", HIDDEN)
def test_terms_that_weigh_nothing_at_first(name, how):
    torch.manual_seed(0)
    model, kind = nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (3, 4))), {"beta": 0.0}

    def loss(o, y):
        term, base = HIDDEN[name](o, y), F.cross_entropy(o[:, 0], y[:, 0])
        return base + (
            kind["beta"] * term if how == "coefficient" else F.relu(term - 20 + kind["beta"] * 100)
        )

    fn, params = pexgrad.per_example_value_and_grad(model, loss), dict(model.named_parameters())
    for b, beta in ((6, 0.0), (4, 1.0), (128, 1.0), (1, 1.0), (3, 0.5)):
        kind["beta"], x, y = beta, torch.randn(b, 3), ids(3)(b)
        losses, rows = fn(params, x, y)
        torch.testing.assert_close(losses, losses_of(model, loss, x, y))
        assert_rows_equal(rows, rows_of(model, loss, x, y))


@pytest.mark.parametrize("size", [len, lambda o: o.shape[0], torch.numel])
def test_a_size_in_flat_graphs_and_after_them(size):
    model, x, y = nn.Linear(3, 4), torch.randn(5, 3), torch.randn(5, 4)
    params = dict(model.named_parameters())

    def loss(o, y):
        return (o - y).square().sum() / size(o)

    want, fn = rows_of(model, loss, x, y), pexgrad.per_example_grad(model, loss)
    assert_rows_equal(fn.lower(params, x, y)(params, x, y), want)
    assert_rows_equal(fn(params, x, y), want)
    stacked = {k: torch.stack([p, p]) for k, p in params.items()}
    mapped = torch.func.vmap(fn, in_dims=(0, None, None))(stacked, x, y)
    assert_rows_equal({k: r[1] for k, r in mapped.items()}, want)
    assert_rows_equal(fn(params, x[:3], y[:3]), {k: r[:3] for k, r in want.items()})


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
    assert [isinstance(p.losses.by_batch, Reduced) for p in fn._traces] == [True]


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


@pytest.mark.parametrize(
    "another",
    [
        lambda o, late: o.mean(0 if late else 1),
        lambda o, late: torch.sum(o, dim=0 if late else 1),
        lambda o, late: o.softmax(0 if late else 1)[:, 0],
        lambda o, late: o.norm(dim=0 if late else 1),
        lambda o, late: o[-1 if late else 0 :].mean(1),
    ],
)
def test_a_float_that_leads_to_another_setting(another):
    """The same functions are called, along another dimension."""
    model, kind = nn.Linear(3, 4), {"step": 0.0}

    def loss(o, y):
        return F.mse_loss(o, y) + another(o, kind["step"] > 5).square().mean()

    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    for b, step in ((4, 0.0), (4, 10.0), (6, 1.0), (6, 10.0), (1, 10.0)):
        kind["step"], x, y = step, torch.randn(b, 3), torch.randn(b, 4)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    assert [isinstance(p.losses.by_batch, Reduced) for p in fn._traces] == [True]


def test_a_float_that_leads_to_another_tensor():
    """The same functions are called, of what was computed for nothing at first."""
    model, kind = nn.Linear(3, 4), {"beta": 0.0}

    def loss(o, y):
        other = y.roll(1, 0)
        return F.mse_loss(o, other if kind["beta"] > 0.5 else y)

    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    for beta in (0.0, 0.4, 1.0, 0.2):
        kind["beta"], x, y = beta, torch.randn(5, 3), torch.randn(5, 4)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))


@pytest.mark.parametrize("later", [(6, 1), (1, 4), (4,), (6, 4)])
def test_a_tensor_that_is_replaced_by_one_of_another_shape(later):
    model, kind = nn.Linear(3, 4), {"weight": torch.tensor(2.0)}

    def loss(o, y):
        return ((o - y) ** 2 * kind["weight"]).mean()

    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    x, y = torch.randn(6, 3), torch.randn(6, 4)
    for weight in (torch.tensor(2.0), torch.rand(later), torch.tensor(3.0)):
        kind["weight"] = weight
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))


@pytest.mark.parametrize(
    "scale",
    [
        lambda n, late: 1.0 / n if late > 0.5 else 1.0,
        lambda n, late: 1.0 + max(0.0, late - 0.5) * n,
        lambda n, late: float(n) if late > 0.5 else 1.0,
    ],
)
def test_a_coefficient_made_of_the_size_later(scale):
    model, kind = nn.Linear(3, 4), {"late": 0.0}

    def loss(o, y):
        n = len(o)
        return (o - y).square().sum() * scale(n, kind["late"])

    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    for b, late in ((4, 0.0), (6, 0.0), (6, 1.0), (4, 1.0), (4, 0.1), (1, 1.0)):
        kind["late"], x, y = late, torch.randn(b, 3), torch.randn(b, 4)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))


def test_a_size_that_is_another_number_later():
    """Which may be the size of the batch by chance: only a float can change unseen, and a size is none."""
    model, kind = nn.Linear(3, 4), {"by": 0.0}

    def loss(out, y):
        size = len(out)
        return (out - y).square().sum() / (kind["by"] or size)

    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    for b, by in ((4, 0.0), (6, 0.0), (6, 6.0), (4, 6.0), (4, 6), (6, 6), (1, 1.0), (5, 0.0)):
        kind["by"], x, y = by, torch.randn(b, 3), torch.randn(b, 4)
        assert_rows_equal(fn(params, x, y), rows_of(model, loss, x, y))
    assert [isinstance(p.losses.by_batch, Reduced) for p in fn._traces] == [True]


def test_a_loss_that_writes_and_changes_its_code():
    model, kind = nn.Linear(3, 4), {"squared": True}

    def loss(out, y):
        out.mul_(2)
        return out.square().mean() if kind["squared"] else out.sum()

    fn, x, params = pexgrad.per_example_grad(model, loss), torch.randn(4, 3), dict(model.named_parameters())
    assert_rows_equal(fn(params, x), rows_of(model, loss, x, None))
    assert [isinstance(p.losses.by_batch, Reduced) for p in fn._traces] == [True]
    for steps in next(iter(fn._traces)).losses.by_batch.steps:
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


def test_a_flat_graph_of_a_loss_that_asks_for_the_size():
    model, x, y = nn.Linear(3, 4), torch.randn(6, 3), torch.randn(6, 4)
    fn = pexgrad.per_example_grad(model, lambda o, y: (o - y).view(o.shape[0], -1).square().sum())
    params = dict(model.named_parameters())
    graph = fn.lower(params, x, y)
    assert graph.meta["batch"] == "any"
    assert_rows_equal(graph(params, x[:2], y[:2]), fn(params, x[:2], y[:2]))
