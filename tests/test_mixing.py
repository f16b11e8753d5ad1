"""What looks at a whole batch is refused whatever the numbers are; what only seems to is not."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import labels
from oracle import assert_rows_equal, rows_of, rows_of_function

import pexgrad
from pexgrad.stages.layout import Untold

pytestmark = pytest.mark.usefixtures("double")

B = 6


def squares(out, _=None):
    return out.flatten(1).square().sum(1)


def params():
    torch.manual_seed(0)
    return {"w": torch.randn(3, 4)}


def with_capacity(p, x):
    """An expert that takes the first so many of the batch."""
    chosen = F.one_hot((x[:, :2]).argmax(1), 2)
    place = (chosen.cumsum(0) * chosen).sum(1)
    return x @ p["w"] * (1 + (place <= 100)[:, None])


def far(x):
    """Nothing, of numbers as small as those here."""
    return F.relu(x - 99)


class Limited(torch.autograd.Function):
    """With code of its own that looks at numbers, of which there is no graph."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g / g.abs().max() if g.abs().max() > 100 else g * 2


@torch.library.custom_op("pexgrad_tests::shifted", mutates_args=())
def shifted_by_the_batch(x: torch.Tensor) -> torch.Tensor:
    return x - x.max().clamp(min=0.5)


@shifted_by_the_batch.register_fake
def _(x):
    return torch.empty_like(x)


shifted_by_the_batch.register_autograd(lambda ctx, g: g)


@torch.library.custom_op("pexgrad_tests::rectified", mutates_args=())
def rectified(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


@rectified.register_fake
def _(x):
    return torch.empty_like(x)


rectified.register_autograd(
    lambda ctx, g: g * (ctx.saved_tensors[0] > 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


MODELS = {
    "gain_of_the_batch": lambda p, x: (x / x.abs().max().clamp(min=100.0)) @ p["w"],
    "gain_of_an_activation": lambda p, x: (h := x @ p["w"]) / h.detach().abs().max().clamp(min=100.0),
    "mean_where_large": lambda p, x: x @ p["w"] + F.relu(x.mean(0) - 50).sum(),
    "neighbours_where_far": lambda p, x: (
        x @ p["w"] + F.relu((x - x.roll(1, 0)).abs().sum(1, keepdim=True) - 99)
    ),
    "filled_by_the_mean": lambda p, x: torch.where(x.isnan(), x.nanmean(0), x) @ p["w"],
    "sorted": lambda p, x: x @ p["w"] + F.relu(x.sort(0).values - 99).sum(1, keepdim=True),
    "pairs": lambda p, x: x @ p["w"] + F.relu(x @ x.T - 999).sum(1, keepdim=True),
    "threshold": lambda p, x: (n := x.norm(dim=1, keepdim=True)) * 0 + x @ p["w"] * (n < 50 * n.median()),
    "capacity": with_capacity,
    "written_into_a_copy": lambda p, x: x.clone().add_(F.relu(x.max() - 99)) @ p["w"],
    "from_the_fold": lambda p, x: (
        h := (x[:, None] @ p["w"]).flatten(0, 1), h + F.relu(h.cumsum(0) - 999)
    )[1].unflatten(0, (len(x), 1)),
    "sizes_of_columns": lambda p, x: (x @ p["w"]).renorm(2, 1, 1e3),
    "seen_in_the_batch": lambda p, x: x @ p["w"] * ~torch.isin(x[:, :1].round(), x[:, 1:].round() + 99),
    "among_the_batch": lambda p, x: x @ p["w"] * (1 + torch.bucketize(x[:, :1], x[:, 0] * 0 + 99)),
    "searched_in_the_batch": lambda p, x: x @ p["w"] * (1 + torch.searchsorted(x[:, 0] * 0 + 99, x[:, :1])),
    "sum_of_products": lambda p, x: x @ p["w"] * (1 + torch.einsum("bi,ci->b", far(x), x)[:, None]),
    "sum_of_products_of_all": lambda p, x: x @ p["w"] * (1 + torch.einsum("...i,ci->...", far(x), x)[:, None]),
    "layer_norm_over_the_batch": lambda p, x: x @ p["w"] * (1 + F.layer_norm(far(x)[:, 0], x.shape[:1])[:, None]),
    "rms_norm_over_the_batch": lambda p, x: x @ p["w"] * (1 + F.rms_norm(far(x)[:, 0], x.shape[:1])[:, None]),
    "group_norm_over_the_batch": lambda p, x: x @ p["w"] * (1 + F.group_norm(far(x).T[None], 1)[0].T[:, :1]),
    "largest_neighbours_and_where": lambda p, x: (
        x @ p["w"] * (1 + F.max_pool2d(far(x)[None, None], (3, 1), 1, (1, 0), return_indices=True)[0][0, 0, :, :1])
    ),
    "interpolated": lambda p, x: (
        x @ p["w"] * (1 + F.interpolate(far(x).T[None], scale_factor=2.0, mode="linear")[0].T[::2, :1])
    ),
    "spectrum_of_the_batch": lambda p, x: x @ p["w"] * (1 + torch.fft.fftn(far(x), dim=(0, 1)).abs()[:, :1]),
    "spectrum_of_numbers": lambda p, x: (
        x @ p["w"] * (1 + torch.fft.ihfft(torch.cat([far(x), far(x)]), dim=0).abs()[:-1, :1])
    ),
    "windows_of_the_batch": lambda p, x: (
        x @ p["w"] * (1 + F.unfold(far(x)[None, None], (3, 1), padding=(1, 0)).sum(1).view(-1, 3)[:, :1])
    ),
    "sampled": lambda p, x: (
        x @ p["w"] * (1 + F.grid_sample(far(x)[None, None], x[None, :, :1, None][..., [0, 0]] * 0, align_corners=False)[0, 0])
    ),
    "native_layer_norm_over_the_batch": lambda p, x: (
        x @ p["w"] * (1 + torch.native_layer_norm(far(x)[:, 0], x.shape[:1], None, None, 1e-5)[0][:, None])
    ),
    "sorted_by_torchs_own": lambda p, x: x @ p["w"] * (1 + torch.msort(far(x))[:, :1]),
    "flipped": lambda p, x: x @ p["w"] * (1 + torch.flipud(far(x))[:, :1]),
    "rotated": lambda p, x: x @ p["w"] * (1 + far(x).rot90(2)[:, :1]),
    "shifted_spectrum": lambda p, x: x @ p["w"] * (1 + torch.fft.fftshift(far(x))[:, :1]),
    "special_softmax": lambda p, x: x @ p["w"] * torch.special.softmax(far(x), 0)[:, :1].clamp(min=1),
    "integrated": lambda p, x: x @ p["w"] * (1 + torch.cumulative_trapezoid(far(x).repeat(2, 1), dim=0)[: len(x), :1]),
    "inverted": lambda p, x: x @ p["w"] * (1 + torch.linalg.pinv(far(x)).T[:, :1]),
    "factorised": lambda p, x: x @ p["w"] * (1 + torch.linalg.lu_factor_ex(far(x))[0][:, :1]),
    "shifted_copies": lambda p, x: x @ p["w"] * (1 + torch.cat([far(x), far(x)])[1 : 1 + len(x), :1]),
    "shifted_by_parts": lambda p, x: x @ p["w"] * (1 + far(x).repeat(2, 1).split([1, len(x), len(x) - 1])[1][:, :1]),
    "number_of_examples": lambda p, x: x @ p["w"] * (1 + x.shape[0] // 100),
    "number_in_a_tensor": lambda p, x: x @ p["w"] * torch.full((), x.shape[0] - 50.0).clamp(min=1),
    "number_counted": lambda p, x: x @ p["w"] * (torch.ones(x.shape[0]).sum() - 50).clamp(min=1),
    "place_in_the_batch": lambda p, x: x @ p["w"] * (1 + (torch.arange(x.shape[0]) // 50)[:, None]),
    "place_gathered_elsewhere": lambda p, x: x @ p["w"] * x.gather(1, (torch.arange(x.shape[0]) // 50)[:, None]),
    "backward_of_ones_own": lambda p, x: Limited.apply(x @ p["w"]),
    "operator_of_ones_own": lambda p, x: x @ p["w"] + 0 * shifted_by_the_batch(far(x) @ p["w"]),
    "steps_through_copies": lambda p, x: x @ p["w"] * (1 + torch.cat([far(x), far(x)])[::2, :1]),
    "folded_otherwise": lambda p, x: x @ p["w"] * (1 + far(x).T.reshape(x.shape)[:, :1]),
    "flattened_otherwise": lambda p, x: x @ p["w"] * (1 + far(x).flatten().view(3, -1).T[:, :1]),
    "place_twice": lambda p, x: x @ p["w"] * x[torch.arange(x.shape[0]), torch.arange(x.shape[0]) // 50][:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_may_mix_is_refused(name):
    with pytest.raises(pexgrad.MixedExamplesError, match=r"depends? on"):
        pexgrad.per_example_grad(MODELS[name], squares)(params(), torch.randn(B, 3))
    # the override, for those who know that it never has an effect
    rows = pexgrad.per_example_grad(MODELS[name], squares, verify=False)(params(), x := torch.randn(B, 3))
    assert_rows_equal(rows, rows_of_function(MODELS[name], params(), squares, x, None))


def spread(v):
    """The standard deviation, which one example has not."""
    return ((v - v.mean(0)).square().sum(0) / (len(v) - 1)).sqrt().sum()


def reading_the_batch(out, y):
    """Data-dependent code, of which there is no graph."""
    weight = torch.bincount(y, minlength=4)
    return F.cross_entropy(out, y, reduction="none") / (weight[y] if int(weight.max()) > 2 else 1)


LOSSES = {
    "weights_of_the_classes": lambda o, y: (
        F.cross_entropy(o, y, reduction="none") / torch.bincount(y, minlength=4)[y]
    ),
    "gain_of_the_batch": lambda o, y: squares(o) / o.detach().abs().max().clamp(min=100),
    "hard_ones": lambda o, y: squares(o) * (squares(o) <= squares(o).mean() + 1e6),
    "balanced": lambda o, y: (
        F.cross_entropy(o, y, reduction="none") + 1e-4 * (o.softmax(1).mean(0).square()).sum()
    ),
    "standardised": lambda o, y: squares(o) * (y - y.double().mean()) / spread(y.double()),
    "sizes_of_columns": lambda o, y: squares(o.renorm(2, 1, 1e3)),
    "sizes_by_torchs_own": lambda o, y: (
        squares(o) * torch.special.softmax((o.detach() > 99).double(), 0)[:, 0].clamp(min=1)
    ),
    "per_target": lambda o, y: F.cross_entropy(o, y, reduction="none") / (y != 9).sum().clamp(min=50),
    "reads_the_batch": reading_the_batch,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_may_mix_is_refused(name):
    x, y = torch.randn(B, 3), torch.tensor([0, 1, 2, 0, 0, 1])
    with pytest.raises(pexgrad.MixedExamplesError):
        pexgrad.per_example_grad(lambda p, x: x @ p["w"], LOSSES[name])(params(), x, y)


def last_of_each(p, x, lengths):
    return (x @ p["w"])[torch.arange(x.shape[0]), lengths]


def last_in_the_fold(p, x, lengths):
    h = (x @ p["w"]).flatten(0, 1)
    return h[torch.arange(x.shape[0]) * x.shape[1] + lengths]


def guided(p, x, lengths):
    """Both halves of classifier-free guidance in one batch."""
    both = torch.cat([x, torch.zeros_like(x)]) @ p["w"]
    with_it, without = both.chunk(2)
    return without + 3 * (with_it - without)


def of_constants(p, x, lengths):
    shared = torch.cat([x.new_ones(1, 3), torch.zeros_like(x[:1, 0])]) @ p["w"]
    return x @ p["w"] + shared.sum(0)


def of_one_constant(p, x, lengths):
    ids = torch.arange(3)[None].expand(x.shape[0], -1)[:1]
    return x @ p["w"] + F.embedding(ids, p["w"]).repeat(x.shape[0], 1, 1).mean(1, keepdim=True)


def sizes_of_each(p, x, lengths):
    return (x @ p["w"]).renorm(2, 0, 1.0)


def seen_in_a_table(p, x, lengths):
    known = torch.isin(lengths, torch.tensor([1, 2])).to(x.dtype) + torch.isin(lengths, 3)
    return x @ p["w"] * (1 + known + torch.bucketize(lengths, torch.tensor([2, 4])))[:, None, None]


def searched_in_each(p, x, lengths):
    return x @ p["w"] * (1 + torch.searchsorted(x.sort(-1).values, x.detach()).sum(-1, keepdim=True))


def slices_of_each(p, x, lengths):
    """The batch on another dimension, along which every place is by itself."""
    h = (x @ p["w"]).transpose(0, 1)  # (t, b, o)
    h = F.layer_norm(h, (4,)) + F.rms_norm(h, (4,)) + F.group_norm(h.transpose(0, 1), 5).transpose(0, 1)
    wide = F.interpolate(h[None], scale_factor=(1.0, 2.0), mode="bilinear")[0]
    largest = F.max_pool2d(h[None], (1, 3), 1, (0, 1), return_indices=True)[0][0]
    return (wide[..., :4] + largest + torch.fft.fftn(h, s=(4,)).abs()).transpose(0, 1)


def products_of_each(p, x, lengths):
    h = x @ p["w"]
    return torch.einsum("b...,b...->b...", h, h) + torch.einsum("bti,bsi->bts", x, x).sum(-1, keepdim=True)


def not_known(p, x, lengths):
    """Of which no rule tells where examples are: copies behind one another, an operator of one's own, a general bilinear map."""
    h = rectified(x @ p["w"]) + torch.cat([x @ p["w"], x.flatten(0, 1).view_as(x) @ p["w"]])[: len(x)]
    twice = torch.cat([h, 2 * h]).unflatten(0, (2, -1)).sum(0) + h.repeat(2, 1, 1).chunk(2)[1]
    return F.bilinear(twice, h, torch.ones(4, 4, 4))


def token_beside_the_fold(p, x, lengths):
    """Of (b t) copies of a token the first b, taken from a value that holds the examples too."""
    h = (x @ p["w"]).flatten(0, 1)[:, None]
    tokens = torch.cat([p["w"][:1].expand(len(h), 1, 4), h], 1)[: len(x), :1]
    return x @ p["w"] + tokens


def windows_in_memory(p, x, lengths):
    h = (x @ p["w"]).transpose(1, 2).contiguous().transpose(1, 2)
    b, s, i = h.stride()
    return h.as_strided((len(x), 4, 2, 4), (b, s, s, i)).sum(2)


LEGITIMATE = [
    last_of_each, last_in_the_fold, guided, of_constants, of_one_constant, sizes_of_each, seen_in_a_table, searched_in_each,
    slices_of_each, products_of_each, not_known, token_beside_the_fold, windows_in_memory,
]  # fmt: skip


@pytest.mark.parametrize("model", LEGITIMATE)
def test_what_only_seems_to_mix_is_not_refused(model):
    fn = pexgrad.per_example_grad(model, squares)
    for batch in (B, 1, 2, 9):
        x = torch.randn(batch, 5, 3), torch.randint(5, (batch,))
        assert_rows_equal(fn(params(), x), rows_of_function(model, params(), squares, x, None))


# --- folds ------------------------------------------------------------------------------------------


def heads_by_task(p, x, task):
    """Time-major tokens, a head for each task: most heads see none of the first examples."""
    tokens, task = x.transpose(0, 1).flatten(0, 1), task.repeat(2)
    out = sum((task == i)[:, None] * (tokens @ p["w"] * (i + 1.0)).sin() for i in range(4))
    return out.unflatten(0, (2, -1)).transpose(0, 1)


def test_a_fold_in_which_no_gradient_reaches_the_first_examples():
    x = torch.randn(B, 2, 3), torch.tensor([0, 0, 0, 1, 2, 3])
    rows = pexgrad.per_example_grad(heads_by_task, squares)(params(), x)
    assert_rows_equal(rows, rows_of_function(heads_by_task, params(), squares, x, None))


class Gated(nn.Module):
    """Time-major, behind a gate that is a buffer: shut, no value and no gradient passes."""

    repeats = staticmethod(lambda ones: ones.expand(2, -1).flatten())

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Linear(3, 4), nn.Linear(4, 4)
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x):
        tokens = self.behind(x.transpose(0, 1).flatten(0, 1)[:, :1].expand(-1, 4) * self.gate) * self.gate
        tokens = tokens * self.repeats(x.new_ones(len(x)))[:, None]
        return tokens.unflatten(0, (2, -1)).transpose(0, 1) + self.before(x)


class GatedUntold(Gated):
    """With an operation of which nobody knows what it does to a fold."""

    repeats = staticmethod(lambda ones: torch.cat([ones, ones]))


@pytest.mark.parametrize("transform", ["per_example_grad", "per_example_grad_norm", "clipped_grad"])
@pytest.mark.parametrize("kind", [Gated, GatedUntold])
def test_a_fold_that_wakes_up_later(kind, transform):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(B, 2, 3)
    options = {"max_norm": 1.0} if transform == "clipped_grad" else {}
    fn, again = (getattr(pexgrad, transform)(model, squares, **options) for _ in range(2))
    params = dict(model.named_parameters())
    fn(params, x)
    layouts = [at for p in fn._traces for s in p.sites for at in s.layouts]
    assert any(isinstance(at, Untold) for at in layouts) == (kind is GatedUntold)
    model.gate.fill_(1)
    got, want = (torch.utils._pytree.tree_leaves(f(params, x)) for f in (fn, again))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    if transform == "per_example_grad":
        assert_rows_equal(dict(zip(params, got, strict=True)), rows_of(model, squares, x, None))


# --- differences that are not numbers ---------------------------------------------------------------


class AverageOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / len(g)


def hooked(p, x):
    h = x @ p["w"]
    h.register_hook(lambda g: g / len(g))
    return h * 1


@pytest.mark.parametrize("model", [lambda p, x: AverageOfGradients.apply(x @ p["w"]), hooked])
def test_a_gradient_that_depends_on_the_number_of_examples(model):
    with pytest.raises(pexgrad.MixedExamplesError, match="number of examples"):
        pexgrad.per_example_grad(model, squares)(params(), torch.randn(B, 3))


class Floored(torch.autograd.Function):
    """A scale for the whole batch, of no effect where no number is large."""

    @staticmethod
    def forward(ctx, x):
        scale = x.abs().max().clamp(min=1e3)
        return (x / scale).tanh() * scale

    @staticmethod
    def backward(ctx, g):
        return g


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1e3 / g.norm()).clamp(max=1)


class FlooredInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(x.abs().max().clamp(min=1e3) / 1e3)

    @staticmethod
    def backward(ctx, g):
        return g


class ByExample(torch.autograd.Function):
    """With a weight, whose gradient is a sum over the batch by right."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e3)
        return ((x / scale).round() * 0 + x) @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = g * (1e3 / g.norm(dim=1, keepdim=True)).clamp(max=1)
        return g @ w.T, x.T @ g


def clipped_by_a_hook(p, x):
    h = x @ p["w"]
    h.register_hook(lambda g: g * (1e3 / g.norm()).clamp(max=1))
    return h * 1


@pytest.mark.parametrize(
    "model",
    [
        lambda p, x: Floored.apply(x @ p["w"]),
        lambda p, x: FlooredInPlace.apply(x @ p["w"]),
        lambda p, x: Clipped.apply(x @ p["w"]),
        clipped_by_a_hook,
    ],
    ids=["forward", "in_place", "backward", "hook"],
)
def test_what_looks_at_the_whole_batch_inside_a_function(model):
    """It has no effect on these examples, and may have one on others."""
    x = torch.randn(B, 3)
    with pytest.raises(pexgrad.MixedExamplesError, match="looks at all examples of the batch at once"):
        pexgrad.per_example_grad(model, squares)(params(), x)
    rows = pexgrad.per_example_grad(model, squares, verify=False)(params(), x)
    assert_rows_equal(rows, pexgrad.per_example_grad(model, squares, strategy="naive")(params(), x))


def test_what_looks_at_each_example_inside_a_function():
    model, x = lambda p, x: ByExample.apply(x, p["w"]), torch.randn(B, 3)
    want = pexgrad.per_example_grad(model, squares, strategy="naive")(params(), x)
    assert_rows_equal(pexgrad.per_example_grad(model, squares)(params(), x), want)


def test_a_number_where_the_definition_has_none():
    def deviation(out, _):
        return squares(out) / spread(out)

    with pytest.raises(pexgrad.MixedExamplesError, match="nan"):
        pexgrad.per_example_grad(lambda p, x: x @ p["w"], deviation)(params(), torch.randn(B, 3))


def test_not_a_number_in_both():
    def root(out, _):
        return (out - out).sum(1).sqrt()  # gradient 0 * inf

    rows = pexgrad.per_example_grad(lambda p, x: x @ p["w"], root)(params(), torch.randn(B, 3))
    assert rows["w"].isnan().all()


# --- what a model remembers -------------------------------------------------------------------------


class Routed(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.head, self.gate, self.last = nn.Linear(4, 3), nn.Linear(4, 2), {}
        if start is not None:
            self.penalty = start

    def forward(self, x):
        gate = self.gate(x).softmax(-1)
        self.penalty = self.last["penalty"] = gate.square().mean()
        return self.head(x) * gate[:, :1]

    def penalised(self, out, y):
        return F.cross_entropy(out, y, reduction="none") + self.further()

    def further(self):
        return self.penalty


@pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])
@pytest.mark.parametrize("start", [None, 0.0, torch.zeros(())])
@pytest.mark.parametrize("where", ["penalty", "last"])
def test_a_loss_that_reads_what_the_forward_wrote(strategy, start, where):
    model = Routed(start)
    losses = {
        "penalty": lambda out, y: F.cross_entropy(out, y, reduction="none") + model.penalty,
        "last": lambda out, y: F.cross_entropy(out, y, reduction="none") + model.last.get("penalty", 0.0),
    }
    fn = pexgrad.per_example_grad(model, losses[where], strategy=strategy)
    with pytest.raises(pexgrad.LossError, match=f"reads '{where}' from the model"):
        fn(dict(model.named_parameters()), torch.randn(B, 4), labels(B, 3))


@pytest.mark.parametrize("how", ["method", "called", "in a dict", "in an object"])
def test_a_loss_that_reads_what_the_forward_wrote_by_code_of_others(how):
    model = Routed(None)
    table = {"loss": lambda out, y: F.cross_entropy(out, y, reduction="none") + model.penalty}
    losses = {
        "method": model.penalised,
        "called": lambda out, y: model.penalised(out, y),
        "in a dict": lambda out, y: table["loss"](out, y),
        "in an object": Penalised(model),
    }
    with pytest.raises(pexgrad.LossError, match="reads 'penalty' from the model"):
        pexgrad.per_example_grad(model, losses[how])(
            dict(model.named_parameters()), torch.randn(B, 4), labels(B, 3)
        )


class Penalised:
    def __init__(self, model):
        self.model = model

    def __call__(self, out, y):
        return self.model.penalised(out, y)


def test_looking_at_what_a_forward_writes_changes_no_parameter():
    model = nn.Embedding(5, 4, max_norm=0.5)
    model.scale, before = 1.0, model.weight.detach().clone()
    fn = pexgrad.per_example_grad(model, lambda out, y: out.flatten(1).sum(1) * model.scale)
    fn(dict(model.named_parameters()), torch.arange(6).reshape(3, 2) % 5)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: F.cross_entropy(o @ o.detach().T, torch.arange(len(o))),
        lambda o, y: ((o[:, 0] - o[:, 0].mean()) * (y - y.mean())).sum(),
    ],
    ids=["contrastive", "covariance"],
)
def test_a_loss_that_compares_examples_by_one_number(loss):
    """By itself an example has no gradient: rows of zeros would be the definition, and nothing to train on."""
    model, x, y = nn.Linear(4, 3), torch.randn(B, 4), torch.randn(B)
    params = dict(model.named_parameters())
    with pytest.raises(pexgrad.LossError, match="it compares the examples of a batch"):
        pexgrad.per_example_grad(model, loss)(params, x, y)
    rows = pexgrad.per_example_grad(model, loss, verify=False)(params, x, y)
    assert not any(r.any() for r in rows.values())


def test_a_loss_that_is_satisfied_has_no_gradient():
    model, x = nn.Linear(4, 3), torch.randn(B, 4)
    rows = pexgrad.per_example_grad(model, lambda o, y: F.relu(o - 1e4).mean())(
        dict(model.named_parameters()), x
    )
    assert not any(r.any() for r in rows.values())


def test_a_loss_that_reads_a_setting_of_the_model():
    model = nn.Linear(4, 3)
    model.temperature = 2.0

    def loss(out, y):
        return F.cross_entropy(out / model.temperature, y, reduction="none")

    assert pexgrad.per_example_grad(model, loss)(
        dict(model.named_parameters()), torch.randn(B, 4), labels(B, 3)
    )["bias"].shape == (B, 3)
