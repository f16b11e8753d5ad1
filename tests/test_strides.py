"""Models that read memory by strides, on tensors that lie in memory in every way there is."""

import pytest
import torch
from cases.case import labels
from oracle import assert_rows_equal, rows_of
from torch import nn

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def named(model):
    return dict(model.named_parameters())


class Frames(nn.Module):
    """Overlapping windows of the input itself, as an audio model cuts them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x.as_strided((x.shape[0], 3, 4), (x.stride(0), 2, 1)).mean(1))


class Places(nn.Module):
    """Places in memory counted from its beginning, in the input and in a parameter."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(5, 5)), nn.Linear(4, 3)

    def forward(self, x):
        table = self.table.as_strided((7, 4), (3, 1), self.table.storage_offset() + 1)
        return self.head(x.as_strided((x.shape[0], 7), (x.stride(0), 1), x.storage_offset() + 1) @ table)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        frames = torch.stft(
            x, 4, 2, window=torch.ones(4, dtype=x.dtype), center=False, return_complex=True
        ).abs()
        return self.head(frames.mean(2))


class Chunks(nn.Module):
    """Overlapping chunks of an activation, as attention in a sliding window takes them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.embed(x.unflatten(1, (4, 2)))
        return self.head(h.as_strided((h.shape[0], 3, 2, 3), (h.stride(0), 3, 3, 1)).mean((1, 2)))


def batches(kind):
    memory = torch.randn(12, 12)
    return {
        "dense": memory[:4, :8].clone(),
        "every other": memory[::3, :8],
        "a part": memory[2:6, 2:10],
        "further on": memory[:, :8].clone()[5:9],
        "transposed": memory[:8, :4].t(),
    }[kind]


KINDS = ["dense", "every other", "a part", "further on", "transposed"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("model", [Frames, Places, Spectrum, Chunks])
def test_rows_whatever_the_strides(model, first):
    torch.manual_seed(0)
    model, y = model(), labels(4, 3)
    fn = pexgrad.per_example_grad(model)
    memory = torch.randn(3 + sum(p.numel() for p in model.parameters()))
    elsewhere = pexgrad.rows.unflatten(memory[3:], named(model))
    for params in (named(model), elsewhere):
        for kind in (first, *KINDS):
            x = batches(kind)
            with torch.no_grad():
                for k, p in model.named_parameters():
                    p.copy_(params[k])
            want = rows_of(model, nn.functional.cross_entropy, x.contiguous(), y)
            assert_rows_equal(fn(params, x, y), want)


@pytest.mark.parametrize("model", [Frames, Places, Spectrum, Chunks])
def test_flat_graphs_and_vmap(model):
    torch.manual_seed(0)
    model, y = model(), labels(4, 3)
    fn = pexgrad.per_example_grad(model)
    for lowered_for in ("dense", "a part"):
        graph = fn.lower(named(model), batches(lowered_for), y)
        for kind in KINDS:
            x = batches(kind)
            want = rows_of(model, nn.functional.cross_entropy, x.contiguous(), y)
            assert_rows_equal(graph(named(model), x, y), want)
            stacked = {k: torch.stack([p, p]) for k, p in named(model).items()}
            both = torch.func.vmap(fn, (0, None, None))(stacked, x, y)
            assert_rows_equal({k: r[1] for k, r in both.items()}, want)
