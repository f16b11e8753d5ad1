"""Numbers so large or small that squares of them leave the range of their dtype, where those of the gradients do not."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from oracle import rows_of

import pexgrad


def named(model):
    return dict(model.named_parameters())


def flat(rows):
    """(B, P) in float64."""
    return torch.cat([r.reshape(r.shape[0], -1).double() for r in rows.values()], 1)


def rows_at_extremes(model, x, y):
    """(B, P) in float64."""
    twin = copy.deepcopy(model).double()
    return flat(rows_of(twin, product, x.double(), y.double()))


def scale(sizes):
    return sizes.clamp(min=1e-30)


def product(out, y):
    return (out * y).flatten(1).sum(1)


class Tied(torch.nn.Module):
    """One matrix used on both sides, over several positions."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(12, 9))

    def forward(self, x):
        return F.linear(x[..., :9], self.w)[..., :9] + F.linear(x, self.w.mT)


EXTREME = {
    "one position": (lambda: torch.nn.Linear(9, 12, bias=False), (9,), (12,)),
    "positions": (lambda: torch.nn.Linear(40, 30, bias=False), (5, 40), (5, 30)),
    "groups": (lambda: torch.nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False), (8, 5, 5), (8, 5, 5)),
    "windows": (lambda: torch.nn.Conv1d(32, 32, 5, bias=False), (32, 8), (32, 4)),
    "tied": (Tied, (3, 12), (3, 9)),
}


SIZES = [(1e10, 1e-25), (1e-25, 1e10), (1e20, 0.0), (1e30, 1e-30), (1e-38, 1e30)]
SETTINGS = [(dtype, sizes) for dtype in (torch.float32, torch.bfloat16) for sizes in SIZES]
SETTINGS += [(torch.float64, (1e200, 1e-210)), (torch.float64, (1e-210, 1e200))]


@pytest.mark.parametrize(("dtype", "sizes"), SETTINGS, ids=str)
@pytest.mark.parametrize("kind", EXTREME)
def test_squares_that_are_in_range_though_those_of_their_factors_are_not(kind, dtype, sizes):
    torch.manual_seed(0)
    make, x_shape, y_shape = EXTREME[kind]
    model = make().to(dtype)
    x, y = (
        (torch.randn(4, *shape).double() * s).to(dtype)
        for shape, s in zip((x_shape, y_shape), sizes, strict=True)
    )
    x[0], y[0] = torch.randn(x_shape), torch.randn(y_shape)
    want = rows_at_extremes(model, x, y)
    norms = want.norm(dim=1)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=0)
    jacobian = pexgrad.per_example_jacobian(model, product)(named(model), x, y)
    close(jacobian.norms().double(), norms)
    if dtype == torch.float32:  # a graph takes its time
        mapped = torch.func.vmap(
            lambda a, b: pexgrad.per_example_grad_norm(model, product)(named(model), a[None], b[None])[0]
        )
        close(mapped(x, y).double(), norms)
    gram, inner = jacobian.gram().double(), want @ want.mT
    close(gram / scale(norms[:, None] * norms), inner / scale(norms[:, None] * norms), rtol=0, atol=tolerance)
    v = {k: torch.randn(p.shape).to(dtype) for k, p in named(model).items()}
    along = want @ flat({k: t[None] for k, t in v.items()})[0]
    close((jacobian @ v).double() / scale(norms), along / scale(norms), rtol=0, atol=10 * tolerance)
    second = jacobian.moments().second
    close(flat({k: t[None] for k, t in second.items()})[0].sum(), want.square().sum(1).mean())


def test_inner_products_of_rows_with_millions_of_numbers():
    """A BLAS may add them all up in plain float32, and keep three digits."""
    x, w = torch.rand(2, 8_000_000) + 0.5, torch.ones(8_000_000)
    jacobian = pexgrad.per_example_jacobian(lambda params, x: (x * params["w"]).sum(1), lambda out, y: out)(
        {"w": w}, x
    )
    wide = x.double()
    torch.testing.assert_close(jacobian.gram().double(), wide @ wide.T, rtol=3e-6, atol=0)
    torch.testing.assert_close((jacobian @ {"w": w}).double(), wide.sum(1), rtol=3e-6, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_distances_far_from_the_origin(offset):
    torch.manual_seed(0)
    x, c = torch.randn(3, 5, 4) + offset, torch.randn(6, 4) + offset
    loss = lambda out, y: out.sin().flatten(1).sum(1)  # noqa: E731
    model = lambda p, x: (x[:, :, None] - p["c"]).norm(dim=-1)  # noqa: E731
    got = pexgrad.per_example_grad(
        lambda p, x: torch.cdist(x, p["c"], compute_mode="donot_use_mm_for_euclid_dist"), loss
    )({"c": c}, x)
    want = pexgrad.per_example_grad(model, loss, strategy="naive")({"c": c.double()}, x.double())
    torch.testing.assert_close(got["c"].double(), want["c"], rtol=0, atol=2e-6 * float(want["c"].abs().max()))


def test_a_slope_that_an_infinite_gradient_passes_by():
    """The square root of what has met its target has an infinite derivative, in an output above zero."""
    x = torch.tensor([[2.0, -1.0], [-1.0, -2.0], [-0.5, 1.0]])
    y = torch.where(x > 1, x, -5.0)
    loss = lambda out, y: (out - y).sqrt().sum(1)  # noqa: E731
    got, want = (
        pexgrad.per_example_grad(lambda p, x: F.prelu(x, p["a"]), loss, strategy=s)(
            {"a": torch.tensor([0.25])}, x, y
        )["a"]
        for s in ("crb", "naive")
    )
    assert want.isfinite().all()
    torch.testing.assert_close(got, want)
