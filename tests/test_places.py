"""What does something else to some places in the batch, or has numbers for them, is refused whatever the numbers are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, wave
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def in_place_view(s, x):
    h = s.lin(x)
    h[:, 0] /= h.detach().abs().max().clamp(min=1e6)
    return h


def some_places(s, x):
    h = s.lin(x)
    h[2:] = 0
    return h


def half_detached(s, x):
    h, n = s.lin(x), x.shape[0] // 2 + 1
    return torch.cat([h[:n], h[n:].detach()])


@pytest.mark.parametrize(
    ("forward", "through"),
    [
        (in_place_view, "max"),
        (some_places, "slice"),
        (half_detached, "slice"),
        (lambda s, x: torch.slice_scatter(s.lin(x), x.new_zeros(1, 3), 0, 0, 1), "slice_scatter"),
        (lambda s, x: s.lin(x).triu(-2), "triu"),
        (lambda s, x: s.lin(x) * torch.ones_like(x).tril(-2), "tril"),
        (lambda s, x: s.lin(x).index_fill(0, torch.tensor([0]), 0), "index_fill"),
        (lambda s, x: s.lin(x).index_put((torch.tensor([0]),), x.new_zeros(1, 3)), "index_put"),
        (lambda s, x: s.lin(x) + s.gate * F.avg_pool1d(s.lin(x).t(), 3, 1, 1).t(), "avg_pool1d"),
        (
            lambda s, x: (
                s.lin(x) + s.gate * F.conv1d(s.lin(x).t()[None], torch.ones(3, 3, 3), padding=1)[0].t()
            ),
            "conv1d",
        ),
        (lambda s, x: s.lin(x) + s.gate * torch.fft.fft(s.lin(x), dim=0).real, "fft_fft"),
        (lambda s, x: s.lin(x) + s.gate * F.pad(s.lin(x), (0, 0, 1, 0))[:-1], "(pad|slice)"),
        (
            lambda s, x: s.lin(x) + s.gate * F.scaled_dot_product_attention(*[s.lin(x)[None]] * 3)[0],
            "scaled_dot",
        ),
        (lambda s, x: s.lin(x) + s.gate * torch.zeros(x.shape[0]).softmax(0)[:, None], "softmax"),
        (lambda s, x: s.lin(x) + s.gate * torch.ones(x.shape[0]).norm(), "linalg_vector_norm"),
        (lambda s, x: s.lin(x) * s.state[: x.shape[0]], "slice"),
        (lambda s, x: s.lin(x) * s.state.narrow(0, 0, x.shape[0]), "narrow"),
        (lambda s, x: s.lin(x) * s.state[torch.arange(x.shape[0])], "arange"),
        (lambda s, x: s.lin(x) * F.embedding(torch.arange(x.shape[0]), s.state), "arange"),
    ],
)
def test_what_acts_on_some_places_in_the_batch(forward, through):
    """On places that no comparison of a few examples looks at, or with numbers that are alike at first."""
    model = Net(forward, lin=nn.Linear(3, 3))
    model.register_buffer("state", torch.ones(8, 3))
    model.register_buffer("gate", torch.zeros(()))  # which hides a term at first
    for b in (8, 5, 2):
        with pytest.raises(
            pexgrad.MixedExamplesError, match=f"through {through}|depends on {through}|first in {through}"
        ):
            pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), torch.randn(b, 3))


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: torch.cat([s.lin(x), x])[: x.shape[0]],
        lambda s, x: torch.cat([s.lin(x), 2 * s.lin(x)]).chunk(2)[1],
        lambda s, x: s.lin(x)[:, 1:] * s.state[:3].tril(1).sum(0)[1:],
        lambda s, x: s.lin(x)[torch.arange(x.shape[0]), 1:],
        lambda s, x: s.lin(x).index_fill(1, torch.tensor([1]), 0),
        lambda s, x: s.lin(x)[:, None].expand(-1, 3, -1).triu(),
        lambda s, x: F.conv1d(s.lin(x).t()[None], torch.ones(3, 3, 1))[0].t(),
        lambda s, x: F.max_pool2d(s.lin(x)[None], (1, 2))[0],
        lambda s, x: F.conv1d(x[None], s.lin(x)[:, None, :2].contiguous(), groups=x.shape[0])[0],
        lambda s, x: F.pad(F.avg_pool1d(s.lin(x)[:, None], 2), (1, 0))[:, 0],
        lambda s, x: F.scaled_dot_product_attention(*[s.lin(x)[None, :, None]] * 3)[0, :, 0],
        lambda s, x: (
            torch.fft.fft(s.lin(x)).real * torch.ones(x.shape[0], 3).softmax(1).norm(dim=1, keepdim=True)
        ),
        lambda s, x: s.lin(x) * F.embedding((x[:, 0] > 0).long(), s.state),
    ],
)
def test_parts_of_each_example_are_no_places_in_the_batch(forward):
    model = Net(forward, lin=nn.Linear(3, 3))
    model.register_buffer("state", torch.rand(8, 3))
    for b in (5, 2, 1):
        x = torch.randn(b, 3)
        rows = pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), x)
        assert_rows_equal(rows, rows_of(model, wave, x, None))


def test_a_cache_with_room_for_more_examples():
    """Keys and values of a decoder, written at their places and read again."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(3, 3), nn.Linear(3, 3)
            self.register_buffer("keys", torch.zeros(8, 6, 3))

        def forward(self, x):
            b, t = x.shape[0], x.shape[1]
            self.keys[:b, 1 : 1 + t] = self.k(x)
            keys = self.keys[:b, : 1 + t]
            return (self.q(x) @ keys.mT).softmax(-1) @ keys

    model, x = Decoder(), torch.randn(5, 4, 3)
    rows = pexgrad.per_example_grad(model, wave)(dict(model.named_parameters()), x)
    assert_rows_equal(rows, rows_of(copy.deepcopy(model), wave, x, None))


def test_weights_of_places_in_a_loss_that_are_alike_at_first():
    weights = torch.ones(8)

    def loss(out, y):
        return out.square().sum(1) * weights[: len(out)]

    model, x = nn.Linear(3, 3), torch.randn(6, 3)
    fn = pexgrad.per_example_grad(model, loss)
    fn(dict(model.named_parameters()), x)
    weights.copy_(torch.arange(8))
    with pytest.raises(pexgrad.MixedExamplesError, match="and the same example alone"):
        fn(dict(model.named_parameters()), x)
