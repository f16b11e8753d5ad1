"""Losses: per example, scalar, and those of torch given directly, each equal to the definition."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, ids, labels, wave
from oracle import assert_rows_equal, losses_of, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.25], dtype=torch.float64)
REDUCTIONS = ("mean", "sum", "none")


def check(model, loss, x, y, **options):
    want = rows_of(model, loss, x, y)
    assert any(r.abs().sum() > 0 for r in want.values())
    losses, rows = pexgrad.per_example_value_and_grad(model, loss, **options)(
        dict(model.named_parameters()), x, y
    )
    assert_rows_equal(rows, want)
    torch.testing.assert_close(losses, losses_of(model, loss, x, y))


def classifier(*extra, b=3):
    """Logits (B, 5, *extra) and labels (B, *extra)."""
    n = 1
    for size in extra:
        n *= size
    model = nn.Sequential(nn.Linear(4, 5 * n), nn.Unflatten(1, (5, *extra)))
    return model, torch.randn(b, 4), ids(b, n, 5).view(b, *extra)


def regressor(b=3, *, squash=None):
    """Outputs and targets (B, 2, 3)."""
    layers = [nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), *([squash] if squash else [])]
    return nn.Sequential(*layers), torch.randn(b, 4), torch.rand(b, 2, 3)


# --- cross-entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), (4,), (2, 3)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": WEIGHT},
        {"ignore_index": 2},
        {"label_smoothing": 0.2},
        {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.1},
    ],
    ids=["plain", "weight", "ignore", "smoothing", "all"],
)
def test_cross_entropy(options, reduction, extra):
    model, x, y = classifier(*extra)
    if not extra:  # an example must keep a label
        y = y.where(y != options.get("ignore_index", -1), 3)
    check(model, nn.CrossEntropyLoss(**options, reduction=reduction), x, y)


@pytest.mark.parametrize("extra", [(), (4,)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"weight": WEIGHT}, {"label_smoothing": 0.2}], ids=["plain", "weight", "smoothing"]
)
def test_cross_entropy_with_probabilities(options, reduction, extra):
    model, x, y = classifier(*extra)
    y = torch.rand(3, 5, *extra).softmax(1)
    check(model, nn.CrossEntropyLoss(**options, reduction=reduction), x, y)


def test_cross_entropy_is_the_default():
    model, x, y = classifier()
    rows = pexgrad.per_example_grad(model)(dict(model.named_parameters()), x, y)
    assert_rows_equal(rows, rows_of(model, F.cross_entropy, x, y))


def test_the_mean_of_every_example_is_over_its_own_tokens():
    """Ignored labels in different numbers: the mean over the batch would weigh examples differently."""
    model, x, _ = classifier(4)
    y = torch.tensor([[0, 1, 2, 3], [1, -100, -100, -100], [-100, 4, 4, -100]])
    check(model, F.cross_entropy, x, y)
    check(model, nn.CrossEntropyLoss(weight=WEIGHT), x, y)
    check(model, lambda o, t: F.cross_entropy(o, t, weight=WEIGHT), x, y)


@pytest.mark.parametrize(
    "loss", [F.cross_entropy, nn.CrossEntropyLoss(weight=WEIGHT), lambda o, y: F.cross_entropy(o, y)]
)
def test_an_example_without_labels_does_not_spoil_the_others(loss):
    """The mean over no token is 0/0: the definition's own loss of that example."""
    model, x, _ = classifier(2)
    y = torch.tensor([[0, 1], [-100, -100], [3, -100]])
    losses, rows = pexgrad.per_example_value_and_grad(model, loss)(dict(model.named_parameters()), x, y)
    want = rows_of(model, loss, x, y)
    torch.testing.assert_close(losses, losses_of(model, loss, x, y), equal_nan=True)
    for name, w in want.items():
        torch.testing.assert_close(rows[name], w, equal_nan=True)
    assert losses.isnan().tolist() == [False, True, False]


# --- the other losses of torch --------------------------------------------------------------------

REGRESSION = {
    "mse": nn.MSELoss, "l1": nn.L1Loss, "smooth_l1": functools.partial(nn.SmoothL1Loss, beta=0.3),
    "huber": functools.partial(nn.HuberLoss, delta=0.2), "poisson": nn.PoissonNLLLoss,
    "poisson_full": functools.partial(nn.PoissonNLLLoss, full=True, log_input=True),
    "logits": nn.BCEWithLogitsLoss,
    "logits_weighted": functools.partial(nn.BCEWithLogitsLoss, weight=WEIGHT[:3], pos_weight=WEIGHT[1:4]),
    "kl": functools.partial(nn.KLDivLoss, log_target=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REGRESSION)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_regression_losses(name, reduction):
    model, x, y = regressor()
    check(model, REGRESSION[name](reduction=reduction), x, y)


def test_kl_divergence_by_batch_mean():
    model, x, y = regressor()
    check(model, nn.KLDivLoss(reduction="batchmean"), x, y.softmax(2))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, WEIGHT[:3]])
def test_binary_cross_entropy(weight, reduction):
    model, x, y = regressor(squash=nn.Sigmoid())
    check(model, nn.BCELoss(weight=weight, reduction=reduction), x, y)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("extra", [(), (4,)])
@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT, "ignore_index": 1}], ids=["plain", "weight"])
def test_negative_log_likelihood(options, extra, reduction):
    model, x, y = classifier(*extra)
    y = torch.where(y == 1, 2, y) if not extra else y
    check(nn.Sequential(model, nn.LogSoftmax(1)), nn.NLLLoss(**options, reduction=reduction), x, y)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "loss",
    [nn.HingeEmbeddingLoss, functools.partial(nn.HingeEmbeddingLoss, margin=0.3), nn.SoftMarginLoss],
    ids=["hinge", "hinge_margin", "soft_margin"],
)
def test_losses_of_signs(loss, reduction):
    model, x, y = regressor()
    check(model, loss(reduction=reduction), x, torch.where(y > 0.5, 1.0, -1.0))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "loss",
    [nn.MultiMarginLoss, functools.partial(nn.MultiMarginLoss, p=2, margin=0.4, weight=WEIGHT)],
    ids=["plain", "weight"],
)
def test_multi_margin(loss, reduction):
    check(classifier()[0], loss(reduction=reduction), torch.randn(3, 4), labels(3))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_multilabel(weight, reduction):
    model, x, _ = classifier()
    check(model, nn.MultiLabelSoftMarginLoss(weight=weight, reduction=reduction), x, ids(3, 5, 2).double())
    check(
        model,
        nn.MultiLabelMarginLoss(reduction=reduction),
        x,
        torch.tensor([[3, 0, -1, 1, 4], [1, -1, 0, 0, 0], [2, 4, 1, -1, -1]]),
    )


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.poisson_nll_loss,
        F.soft_margin_loss,
    ],
    ids=lambda loss: loss.__name__,
)
def test_functions_given_directly(loss):
    model, x, y = regressor()
    check(model, loss, x, torch.where(y > 0.5, 1.0, -1.0) if loss is F.soft_margin_loss else y)


@pytest.mark.parametrize(
    "loss", [F.nll_loss, F.multi_margin_loss, F.cross_entropy], ids=lambda loss: loss.__name__
)
def test_functions_of_labels_given_directly(loss):
    model, x, y = classifier()
    check(nn.Sequential(model, nn.LogSoftmax(1)), loss, x, y)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_partial_of_a_function(reduction):
    model, x, y = classifier(4)
    check(model, functools.partial(F.cross_entropy, label_smoothing=0.1, reduction=reduction), x, y)


class Focal(nn.CrossEntropyLoss):
    """A class of the user's own that looks like one of torch."""

    def forward(self, out, y):
        return (1 - out.softmax(1).gather(1, y[:, None]).mean()) ** 2 * super().forward(out, y)


def test_a_loss_that_derives_from_one_of_torch_is_not_taken_for_it():
    model, x, y = classifier()
    check(model, Focal(), x, y)


@pytest.mark.parametrize("name", ["cross_entropy", "mse_loss"])
def test_a_function_of_the_users_own_with_a_known_name(name):
    def loss(out, y):
        return 2 * out.square().mean() + y.sum()

    loss.__name__ = loss.__qualname__ = name
    model, x, y = classifier()
    check(model, loss, x, y)


def test_weights_of_a_loss_are_read_at_every_call():
    model, x, y = classifier()
    loss = nn.CrossEntropyLoss(weight=WEIGHT.clone(), reduction="sum")
    fn = pexgrad.per_example_grad(model, loss)
    for scale in (1, 5):
        loss.weight.mul_(scale)
        assert_rows_equal(fn(dict(model.named_parameters()), x, y), rows_of(model, loss, x, y))


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize(
    "loss", [F.mse_loss, nn.MSELoss(reduction="sum"), nn.L1Loss(), lambda o, y: F.mse_loss(o, y)]
)
def test_columns_against_vectors(loss):
    """(B, 1) against (B,): over the batch this broadcasts to (B, B), over one example it does not."""
    check(nn.Linear(4, 1), loss, torch.randn(3, 4), torch.randn(3))


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_broadcast_over_other_dimensions():
    check(nn.Linear(4, 5), nn.MSELoss(), torch.randn(3, 2, 4), torch.randn(3, 1, 5))
    check(nn.Linear(4, 1), nn.MSELoss(), torch.randn(3, 2, 4), torch.randn(3, 2, 5))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 3)])
def test_losses_by_example_are_summed_over_what_remains(shape):
    def loss(out, y):  # (B, *shape)
        return (out - y).view(-1, *shape, 12 // max(1, torch.Size(shape).numel())).sin().sum(-1)

    check(nn.Linear(4, 12), loss, torch.randn(3, 4), torch.randn(3, 12))


@pytest.mark.parametrize("b", [1, 2, 5, 6])
def test_losses_by_example_where_sizes_coincide(b):
    check(nn.Linear(4, 5), wave, torch.randn(b, 4), None)
    check(nn.Linear(4, 5), F.cross_entropy, torch.randn(b, 4), labels(b))
    check(nn.Linear(4, 5), lambda o, y: F.cross_entropy(o, y), torch.randn(b, 4), labels(b))


def test_a_scalar_loss_of_every_reduction():
    x, y = torch.randn(3, 4), torch.randn(3, 2, 5)
    model = nn.Sequential(nn.Linear(4, 10), nn.Unflatten(1, (2, 5)))
    for loss in (
        lambda o, t: (o - t).square().mean(),
        lambda o, t: (o - t).norm(),
        lambda o, t: (o * t).sum().tanh(),
    ):
        check(model, loss, x, y)


@pytest.mark.parametrize("t", [5, 3, 1])
def test_a_scalar_loss_of_an_output_whose_batch_is_elsewhere(t):
    """(T, B, C): an example is a slice of dimension 1, though T may be the batch size as well."""
    model = Net(lambda s, x: s.lin(x.transpose(0, 1)), lin=nn.Linear(4, 2))
    check(model, lambda out, y: out.square().mean() * out[0].sum(), torch.randn(3, t, 4), None)


def test_no_target():
    model = nn.Linear(4, 5)
    rows = pexgrad.per_example_grad(model, lambda out, y: out.square().sum() if y is None else None)
    x = torch.randn(3, 4)
    assert_rows_equal(
        rows(dict(model.named_parameters()), x, None), rows_of(model, lambda o, y: o.square().sum(), x, None)
    )


def test_target_of_another_kind_than_the_input():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5))
    check(model, F.cross_entropy, ids(3, 3, 7), torch.rand(3, 5).softmax(1))


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
def test_losses_of_each_strategy(strategy):
    model, x, y = classifier(4)
    check(model, nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1), x, y, strategy=strategy)


# --- what is no loss ------------------------------------------------------------------------------


def refusal(loss, model=None, x=None, y=None, error="(?i)loss"):
    model = model or nn.Linear(4, 5)
    x = torch.randn(3, 4) if x is None else x
    with pytest.raises(pexgrad.PexgradError, match=error) as info:
        pexgrad.per_example_grad(model, loss)(dict(model.named_parameters()), x, y)
    return str(info.value)


def test_a_loss_of_the_wrong_length():
    message = refusal(lambda out, y: out.sum(0))  # (5,) for 3 examples
    assert "5" in message and "3" in message


def test_a_loss_of_the_wrong_length_that_equals_the_batch():
    """(5,) over features for 5 examples: the numbers agree, the meaning does not."""
    refusal(lambda out, y: out.square().sum(0), x=torch.randn(5, 4), error=".")


def test_a_loss_that_is_no_tensor():
    refusal(lambda out, y: None)
    refusal(lambda out, y: (out.sum(1), out))


def test_a_loss_of_integers():
    refusal(lambda out, y: out.argmax(1))


def test_a_complex_loss():
    refusal(lambda out, y: torch.complex(out, out).sum(1))


def test_an_error_inside_the_loss_names_it():
    def loss(out, y):
        return F.cross_entropy(out, y["label"])

    with pytest.raises(Exception, match="label"):
        pexgrad.per_example_grad(nn.Linear(4, 5), loss)(
            dict(nn.Linear(4, 5).named_parameters()), torch.randn(3, 4), {"class": labels(3)}
        )


def test_class_weights_by_labels_of_a_byte():
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    loss = nn.CrossEntropyLoss(weight=torch.rand(3) + 0.5)
    fn = pexgrad.per_example_grad(model, loss)
    assert_rows_equal(fn(dict(model.named_parameters()), x, y.byte()), rows_of(model, loss, x, y))


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: out["loss"],
        lambda out, y: out["logits"].sum(1) + out["loss"],
        lambda out, y: 2 * out["loss"],
        lambda out, y: torch.exp(out["loss"]),
        lambda out, y: out["loss"].sqrt(),
    ],
)
def test_a_loss_that_the_model_has_averaged_itself(loss):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x, y):
            logits = self.head(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits}

    model = WithLoss()
    with pytest.raises(pexgrad.TraceError, match=r"depends on the whole batch .*compute it in the loss"):
        pexgrad.per_example_grad(model, loss)(
            dict(model.named_parameters()), (torch.randn(4, 4), torch.arange(4) % 3)
        )


def test_nothing_keeps_a_loss_alive():
    def made():
        table, model = torch.randn(7, 5), nn.Linear(4, 5)
        fn = pexgrad.per_example_grad(model, lambda o, y: (o[:, None] - table).square().sum((1, 2)))
        fn(dict(model.named_parameters()), torch.randn(3, 4))
        return weakref.ref(table)

    held = made()
    gc.collect()
    assert held() is None


SQUEEZING = {
    "each": lambda o, y: F.mse_loss(o.squeeze(), y, reduction="none"),
    "mean": lambda o, y: F.mse_loss(o.squeeze(), y),
    "rows": lambda o, y: (o.squeeze() - y).square().sum(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("first", [1, 2, 5])
@pytest.mark.parametrize("loss", SQUEEZING)
def test_a_loss_that_squeezes(loss, first):
    """It takes the batch away where there is one example."""
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 1), SQUEEZING[loss]
    fn, params = pexgrad.per_example_grad(model, loss), dict(model.named_parameters())
    chunked = pexgrad.per_example_grad(model, loss, chunk_size=2)
    for b in (first, 1, 3, 5):
        x, y = torch.randn(b, 4), torch.randn(b)
        for answer in (fn, chunked):
            assert_rows_equal(answer(params, x, y), rows_of(model, loss, x, y))
    graph = fn.lower(params, torch.randn(5, 4), torch.randn(5))
    for b in (1, 5, 8) if graph.meta["batch"] == "any" else (5,):
        x, y = torch.randn(b, 4), torch.randn(b)
        assert_rows_equal(graph(params, x, y), rows_of(model, loss, x, y))


def halved(o, y):
    return ((o - y.div_(2)) ** 2).sum(1)


def shifted(o, y):
    y[:, 1:] = y[:, :-1].clone()
    return ((o - y) ** 2).sum(1)


def counted_from_one(o, y):
    return F.cross_entropy(o, y.sub_(1), reduction="none")


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
@pytest.mark.parametrize("loss", [halved, shifted, counted_from_one])
def test_a_loss_that_writes_into_its_targets(loss, strategy, single):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    of = (lambda o, y: loss(o, y).mean()) if single else loss
    y = torch.tensor([1, 2, 3, 3, 2]) if loss is counted_from_one else torch.randn(5, 3)
    want = rows_of(model, lambda o, y: of(o, y.clone()), x, y)
    fn, kept = pexgrad.per_example_grad(model, of, strategy=strategy), y.clone()
    for _ in range(2):
        assert_rows_equal(fn(dict(model.named_parameters()), x, y), want)
        assert torch.equal(y, kept)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_example_of_a_class_without_weight(smoothing):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 0.0, 2.0]), label_smoothing=smoothing)
    model, x, y = nn.Linear(4, 3), torch.randn(4, 4), torch.tensor([0, 1, 2, 1])
    losses, rows = pexgrad.per_example_value_and_grad(model, loss)(dict(model.named_parameters()), x, y)
    torch.testing.assert_close(losses, losses_of(model, loss, x, y), equal_nan=True)
    want = rows_of(model, loss, x, y)
    torch.testing.assert_close({k: rows[k] for k in want}, want, equal_nan=True)


@pytest.mark.parametrize("strategy", ["crb", "multi"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: o.mul_(2).pow(2).flatten().dot(WEIGHTS),
        lambda o, y: (o.clamp_(-1, 1) * WEIGHTS).sum().exp(),
        lambda o, y: o.as_strided((3,), (1,), 0).dot(WEIGHTS).sin(),
        lambda o, y: o.flatten().dot(WEIGHTS) * (1 + o.storage_offset()),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_loss_of_one_example_has_an_output_of_its_own(loss, strategy, verify):
    x, p = torch.randn(4, 3), {"w": torch.randn(3)}
    got, want = (
        pexgrad.per_example_grad(lambda p, x: x * p["w"], loss, strategy=s, verify=verify)(p, x)
        for s in (strategy, "naive")
    )
    torch.testing.assert_close(got, want)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)
