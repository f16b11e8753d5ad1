"""Values that are computed from parameters: the ones that a factor goes through, and the rows that are not built then."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from memory import Allocations
from models import TABLE, each, pick
from oracle import assert_rows_equal, rows_of

import pexgrad

THROUGH = """
    low_rank_updates_merged_into_frozen_weights low_rank_update_used_twice_beside_its_own_factor
    weight_times_itself_and_its_transpose product_of_three_matrices_one_of_which_is_a_buffer low_rank_weights_of_heads
    recurrence_with_a_low_rank_weight scales_that_are_stored_as_what_they_differ_from_one
    relative_positions_by_an_embedding low_rank_weight_cut_off_in_part normalised_weights_at_several_positions
    normalised_weights_of_one_number_a_line weights_by_their_spectral_norms
    pruned_layers pruned_convolutions pruned_layers_at_several_positions weights_cut_to_triangles_and_chosen
    square_roots_behind_a_mask directions_of_classes directions_at_several_positions directions_of_words
    weights_by_functions_of_parameters weights_by_their_sizes normalised_convolutions_of_few_positions
    standardised_convolutions weights_by_their_spreads number_by_its_size
"""


def named(model):
    return dict(model.named_parameters())


def jacobian(case):
    model, x, y, loss = case.build()
    return pexgrad.per_example_jacobian(model, loss)(named(model), x, y)


@each(pick(THROUGH))
def test_every_factor_goes_to_the_parameters(case):
    assert all(term.window is not None for term in jacobian(case).terms)


OTHERS = """
    low_rank_weight_with_more_positions_than_it_pays convolution_with_a_low_rank_update
    weights_written_into_and_scaled_by_a_parameter first_positions_of_larger_tables
"""


@each(pick(OTHERS))
def test_some_do_not(case):
    assert any(term.window is None for term in jacobian(case).terms)


class Merged(nn.Module):
    """A frozen weight with a low-rank update."""

    def __init__(self, size, rank):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, size)), nn.Parameter(torch.randn(size, rank))

    def forward(self, x):
        return F.linear(x, self.w + 0.5 * (self.b @ self.a))


def test_no_row_of_the_size_of_the_weight():
    model, x = Merged(64, 2), torch.randn(128, 64)
    y, params = torch.randint(64, (128,)), named(model)
    for make in (
        pexgrad.per_example_grad,
        pexgrad.per_example_grad_norm,
        lambda m: pexgrad.clipped_grad(m, max_norm=1.0),
    ):
        fn = make(model)
        fn(params, x, y)
        with Allocations() as seen:
            fn(params, x, y)
        assert seen.largest < 128 * 64 * 64  # bytes, of the four times as many that the rows of w have


class Masked(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size))
        self.register_buffer("mask", (torch.rand(size, size) > 0.5).float())

    def forward(self, x):
        return F.linear(x, self.w * self.mask)


class Directions(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size, size))

    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.w))


@pytest.mark.parametrize("make", [Masked, Directions])
def test_norms_and_clipped_sums_without_rows(make):
    model, x, y = make(64), torch.randn(128, 64), torch.randint(64, (128,))
    params = named(model)
    for fn in (pexgrad.per_example_grad_norm(model), pexgrad.clipped_grad(model, max_norm=1.0)):
        fn(params, x, y)
        with Allocations() as seen:
            fn(params, x, y)
        assert seen.largest < 128 * 64 * 64  # bytes, of the four times as many that the rows have


def test_a_jacobian_knows_what_mask_it_reads():
    model, x, y = Masked(4), torch.randn(3, 4), torch.tensor([0, 1, 2])
    J = pexgrad.per_example_jacobian(model)(named(model), x, y)
    model.mask.zero_()
    with pytest.raises(pexgrad.InputError, match="changed in place"):
        J.norms()


@pytest.mark.parametrize(("size", "weight"), [(1e-25, 1e20), (1e15, 3.0)])
def test_norms_under_a_mask_of_any_size(size, weight):
    torch.manual_seed(0)
    model, x = Masked(6), torch.randn(3, 6)
    loss = lambda out, y: out.sum(1) * weight  # noqa: E731
    model.mask.mul_(size)
    norms = pexgrad.per_example_grad_norm(model, loss)(named(model), x)
    want = rows_of(model.double(), loss, x.double(), None)["w"].flatten(1).norm(dim=1)
    torch.testing.assert_close(norms.double(), want, rtol=1e-5, atol=0)


def test_the_table_says_so():
    model = Merged(64, 2)
    table = pexgrad.per_example_grad(model).explain(named(model), torch.randn(3, 64), torch.randint(64, (3,)))
    found = {line.parameter: (line.rows, line.norms, line.flags) for line in table.lines}
    assert found["a"] == found["b"] == ("outer product", "product of norms", "derived")


@pytest.mark.parametrize("create_graph", [False, True])
def test_complex_parameters(create_graph):
    def model(p, x):
        w = p["u"] @ p["v"] * (1 + 2j) - 3j * p["w"].mT / (1 - 1j)
        return torch.view_as_real(F.linear(x + 1j * x.flip(-1), w, (2 - 1j) * p["c"])).flatten(1)

    shapes = {"u": (5, 2), "v": (2, 4), "w": (4, 5), "c": (5,)}
    params = {k: torch.randn(s, dtype=torch.cdouble, requires_grad=create_graph) for k, s in shapes.items()}
    x, y = torch.randn(3, 4, dtype=torch.double), torch.randn(3, 10, dtype=torch.double)
    options = {"create_graph": create_graph}
    got, want = (
        pexgrad.per_example_grad(model, F.mse_loss, strategy=s, **options)(params, x, y)
        for s in ("crb", "naive")
    )
    assert_rows_equal(got, want)
    norms, from_rows = (
        pexgrad.per_example_grad_norm(model, F.mse_loss, strategy=s, **options)(params, x, y)
        for s in ("crb", "naive")
    )
    torch.testing.assert_close(norms, from_rows)
    assert all(t.window for t in pexgrad.per_example_jacobian(model, F.mse_loss)(params, x, y).terms)
    if create_graph:
        total = lambda rows: sum((r.abs() ** 2).sum() for r in rows.values())  # noqa: E731
        second, wanted = (torch.autograd.grad(total(rows), list(params.values())) for rows in (got, want))
        assert_rows_equal(dict(zip(params, second, strict=True)), dict(zip(params, wanted, strict=True)))


@pytest.mark.parametrize("make", [lambda n: Merged(n, 3), Masked, Directions])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_precision(dtype, make):
    """Half precision keeps what is between the factors in float32, as torch's own products do inside."""
    torch.manual_seed(0)
    model = make(16)
    x, y = torch.randn(4, 5, 16), torch.randn(4, 5, 16)
    want = rows_of(model.double(), F.mse_loss, x.double(), y.double())
    model.to(dtype)
    rows = pexgrad.per_example_grad(model, F.mse_loss)(named(model), x.to(dtype), y.to(dtype))
    for k, r in rows.items():
        assert r.dtype == dtype
        torch.testing.assert_close(
            r.double(), want[k], rtol=0, atol=3 * torch.finfo(dtype).eps * float(want[k].abs().max())
        )


def test_under_autocast():
    torch.manual_seed(0)
    model, x, y = Merged(16, 3).float(), torch.randn(4, 5, 16), torch.randn(4, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (
            pexgrad.per_example_grad(model, F.mse_loss, strategy=s)(named(model), x, y)
            for s in ("crb", "naive")
        )
    for k, r in got.items():
        torch.testing.assert_close(r, want[k], rtol=0, atol=0.05 * float(want[k].abs().max()))


def test_a_scale_that_changes():
    """One that is a buffer is read at each call."""
    model, x, y, loss = TABLE["low_rank_weights_of_heads"].build()
    fn = pexgrad.per_example_grad(model, loss)
    for scale in (0.7, -2.0):
        model.scale.fill_(scale)
        assert_rows_equal(fn(named(model), x, y), rows_of(model, loss, x, y), tol=1e-5)


def test_norms_where_uses_all_but_undo_one_another():
    """Their squares and products, added up, would be rounding."""

    def model(p, x):
        return x @ (p["w"] - p["w"].T)

    x = 1 + 1e-4 * torch.randn(4, 6)
    got = pexgrad.per_example_grad_norm(model, lambda out, y: out.sum(1))({"w": torch.randn(6, 6)}, x)
    want = (x[:, :, None] - x[:, None, :]).double().flatten(1).norm(dim=1)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)


def test_norms_where_a_gradient_is_along_its_line():
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3, bias=False))
    v = model.parametrizations.weight.original1
    x = v.detach()[:1].repeat(4, 1)  # along the first line
    params = named(model)
    norms = pexgrad.per_example_grad_norm(model, lambda out, y: out[:, 0], per_param=True)(params, x)
    rows = pexgrad.per_example_grad(model, lambda out, y: out[:, 0], strategy="naive")(params, x)
    got, want = (
        norms["parametrizations.weight.original1"],
        rows["parametrizations.weight.original1"].flatten(1).norm(dim=1),
    )
    assert (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("steps", [3, 2000])
def test_code_of_any_length(steps):
    def model(p, x):
        w = p["w"]
        for _ in range(steps):
            w = w + 1
        return F.linear(x, w)

    params, x, y = {"w": torch.randn(3, 4)}, torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    J = pexgrad.per_example_jacobian(model)(params, x, y)
    assert all(t.window is not None for t in J.terms) == (steps == 3)
    assert_rows_equal(J.rows(), pexgrad.per_example_grad(model, strategy="naive")(params, x, y), tol=1e-4)


def centred(p, x):
    return F.linear(x, p["w"] - p["w"].mean(1, keepdim=True))


def differences(p, x):
    return F.linear(x[:, 0], p["w"]) - F.linear(x[:, 1], p["w"])


def differences_of_images(p, x):
    h = F.conv2d(x.unflatten(2, (4, 2, 2)).flatten(0, 1), p["k"], padding=1).unflatten(0, x.shape[:2])
    return (h[:, 0] - h[:, 1]).flatten(1)


def differences_on_both_sides(p, x):
    """Two factors of one matrix, whose own positions cancel in each."""
    back = F.linear(x[:, 0, :6], p["w"].mT) - F.linear(x[:, 1, :6], p["w"].mT)
    return torch.cat([differences(p, x), back], 1)


@pytest.mark.parametrize("model", [centred, differences, differences_on_both_sides, differences_of_images])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_squares_of_what_all_but_cancels(model, offset):
    """Norms, inner products and graphs take the rows: sums of large inner products would be rounding."""
    torch.manual_seed(0)
    params = {"w": torch.randn(6, 16), "k": torch.randn(16, 4, 3, 3)}
    x = torch.randn(3, 16) if model is centred else torch.randn(3, 1, 16) + 0.1 * torch.randn(3, 2, 16)
    x, loss = x + offset, lambda out, y: out.sum(1) if model is centred else out.cos().sum(1)
    norms, J = (
        pexgrad.per_example_grad_norm(model, loss),
        pexgrad.per_example_jacobian(model, loss)(params, x),
    )
    rows = torch.cat([r.flatten(1).double() for r in J.rows().values()], 1)
    want = rows.norm(dim=1)
    found = {
        "norms": norms(params, x),
        "clipped": pexgrad.clipped_grad(model, loss, max_norm=1.0)(params, x).norms,
        "graph": norms.lower(params, x)(params, x, None),
        "gram": J.gram().diagonal().sqrt(),
        "gram of two": J.gram(pexgrad.per_example_jacobian(model, loss)(params, x.clone())).diagonal().sqrt(),
    }
    for name, got in found.items():
        torch.testing.assert_close(
            got.double(), want, rtol=1e-3, atol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
@pytest.mark.parametrize("of", ["divided by it", "dividing it", "scaled by it"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_constants_of_any_dtype(dtype, of, precision):
    torch.manual_seed(0)
    c = torch.randint(1, 9, (3, 4)).to(dtype)
    weights = {
        "divided by it": lambda w: w / c,
        "dividing it": lambda w: c / w,
        "scaled by it": lambda w: w * c,
    }
    params, x = {"w": torch.rand(3, 4, dtype=precision) + 0.5}, torch.randn(5, 4, dtype=precision)
    got, want = (
        pexgrad.per_example_grad(
            lambda p, x: F.linear(x, weights[of](p["w"])), lambda o, y: o.sin().sum(1), strategy=s
        )(params, x)
        for s in ("crb", "naive")
    )
    torch.testing.assert_close(
        got, want, rtol=16 * torch.finfo(precision).eps, atol=16 * torch.finfo(precision).eps
    )


@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w.masked_fill(w > 0, 0),
        torch.relu,
        torch.tril,
        lambda w: w.clamp(-0.1, 0.1),
        lambda w: w.relu().clamp(max=0.5),
    ],
)
def test_masks_hide_what_is_no_number(cut):
    model = lambda p, x: torch.nan_to_num(F.linear(x, cut(p["w"])))  # noqa: E731
    params, x = (
        {"w": torch.linspace(-1, 1, 12).reshape(3, 4)},
        torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, torch.inf, 0.5, 1.0]]),
    )
    got, want = (
        pexgrad.per_example_grad(model, lambda o, y: o.sin().sum(1), strategy=s)(params, x)["w"]
        for s in ("crb", "naive")
    )
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@pytest.mark.parametrize(
    "of",
    [
        F.normalize,
        lambda w: F.normalize(w, dim=0),
        lambda w: w - w.mean(1, keepdim=True),
        lambda w: w - w.sum(),
    ],
)
def test_weights_without_numbers(of, shape):
    params, x = {"w": torch.randn(shape)}, torch.randn(5, shape[1])
    fn = pexgrad.per_example_grad(lambda p, x: F.linear(x, of(p["w"])), lambda o, y: o.sin().sum(1))
    assert fn(params, x)["w"].shape == (5, *shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 5])
def test_norms_of_centred_convolutions_in_half_precision(dtype, offset):
    torch.manual_seed(0)

    def model(p, x):
        return F.conv2d(x, p["k"] - p["k"].mean((1, 2, 3), keepdim=True), padding=1).flatten(1)

    params, x = {"k": torch.randn(16, 16, 3, 3, dtype=dtype)}, (torch.randn(3, 16, 2, 2) + offset).to(dtype)
    J = pexgrad.per_example_jacobian(model, lambda out, y: out.float().sin().sum(1))(params, x)
    want = J.rows()["k"].float().flatten(1).norm(dim=1)
    torch.testing.assert_close(J.norms(), want, rtol=5e-3, atol=0)
    torch.testing.assert_close(J.gram().diagonal().sqrt(), want, rtol=5e-3, atol=0)
