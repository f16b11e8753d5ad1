"""What is promised about memory: norms, sums and inner products without rows, and streams of any length."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net
from memory import Allocations, allocations
from torch.utils.data import DataLoader, TensorDataset

import pexgrad

MB = 1 << 20


def named(model):
    return {k: p.detach() for k, p in model.named_parameters()}


def bytes_of(*shape):
    return 4 * torch.Size(shape).numel()


def total(out, y=None):
    return out.flatten(1).square().sum(1)


def test_rows_are_seen():
    """The measure is one: what builds rows shows them."""
    model, x = nn.Linear(200, 100), torch.randn(16, 12, 200)
    rows = bytes_of(16, 100, 200)
    fn = pexgrad.per_example_grad(model, total)
    seen = allocations(lambda: fn(named(model), x))
    assert seen.largest >= rows and seen.peak >= rows
    fn = pexgrad.per_example_grad_norm(model, total)
    seen = allocations(lambda: fn(named(model), x))
    assert seen.largest < rows / 4


def test_rows_of_chunks_are_there_once():
    model, x = nn.Linear(200, 100), torch.randn(16, 12, 200)
    fn = pexgrad.per_example_grad(model, total, chunk_size=2)
    assert allocations(lambda: fn(named(model), x)).peak < 1.3 * bytes_of(16, 100, 200)


def test_memory_that_is_freed_is_counted_once():
    seen = allocations(lambda: [torch.ones(1000) for _ in range(3)] and torch.ones(500))
    assert seen.largest == bytes_of(1000) and bytes_of(3000) <= seen.peak <= bytes_of(3500)
    seen = allocations(lambda: [torch.ones(1000).sum().item() for _ in range(9)])
    assert seen.peak < bytes_of(2100)


# --- an embedding of a million words ------------------------------------------------------------------


def million():
    params = {"weight": torch.randn(1_000_000, 5)}
    ids, y = torch.randint(1_000_000, (64, 100)), torch.randint(5, (64,))
    return lambda p, ids: F.embedding(ids, p["weight"]).mean(1), params, ids, y


def test_the_norm_of_a_large_embedding():
    model, params, ids, y = million()
    fn = pexgrad.per_example_grad_norm(model)
    assert allocations(lambda: fn(params, ids, y)).peak < 2 * MB


@pytest.mark.parametrize("how", ["flat", "per_parameter", "automatic"])
def test_the_clipped_sum_of_a_large_embedding(how):
    """Its result is a table itself; nothing else is."""
    model, params, ids, y = million()
    fn = pexgrad.clipped_grad(model, max_norm=1.0, clip=how)
    assert allocations(lambda: fn(params, ids, y)).peak < bytes_of(1_000_000, 5) + 2 * MB


def test_inner_products_of_a_large_embedding():
    model, params, ids, y = million()
    fn = pexgrad.per_example_jacobian(model)
    other = fn(params, ids[:20], y[:20])
    assert allocations(lambda: fn(params, ids, y).gram(other)).peak < 24 * MB
    assert allocations(lambda: fn(params, ids, y) @ params).peak < 2 * MB


def tied():
    def forward(s, ids):
        return s.lin(s.emb(ids)).tanh() @ s.emb.weight.T

    return Net(forward, emb=nn.Embedding(3000, 40), lin=nn.Linear(40, 40))


@pytest.mark.parametrize("given", [False, True])
def test_rows_of_an_embedding_that_is_the_head_are_built_once(given):
    model, ids = tied(), torch.randint(3000, (8, 6))
    rows = bytes_of(8, 3000, 40)
    fn = pexgrad.per_example_grad(model, total)
    out = {k: p.new_empty(8, *p.shape) for k, p in named(model).items()} if given else None
    fn(named(model), ids)  # traced and verified
    seen = allocations(lambda: fn(named(model), ids, out=out))
    assert seen.peak < (0 if given else rows) + 0.75 * rows  # logits and their cotangents


@pytest.mark.parametrize("layout", ["contiguous", "examples last", "transposed"])
def test_rows_of_several_uses_in_any_memory(layout):
    model, ids = tied(), torch.randint(3000, (4, 6))
    fn = pexgrad.per_example_grad(model, total)
    want = fn(named(model), ids)
    order = {"contiguous": (0, 1, 2), "examples last": (2, 0, 1), "transposed": (0, 2, 1)}[layout]
    back = [order.index(i) for i in range(3)]
    out = {k: torch.full((4, *p.shape), 7.0) for k, p in named(model).items()}
    out["emb.weight"] = out["emb.weight"].permute(order).contiguous().permute(back)
    got = fn(named(model), ids, out=out)
    for k, r in got.items():
        torch.testing.assert_close(r, want[k])
        assert r.data_ptr() == out[k].data_ptr()


# --- layers over many positions -----------------------------------------------------------------------


def test_a_wide_layer_over_many_positions():
    """No rows (604 MB), and nothing by example and position beyond the layer's own output and its cotangent."""
    model, x = nn.Linear(3072, 768), torch.randn(64, 128, 3072)
    output = bytes_of(64, 128, 768)
    params, norm = named(model), pexgrad.per_example_grad_norm(model, total)
    seen = allocations(lambda: norm(params, x))
    assert seen.largest <= output and seen.peak < 5 * output
    clipped = pexgrad.clipped_grad(model, total, max_norm=1.0)
    with_sum = allocations(lambda: clipped(params, x))
    assert with_sum.largest <= output and with_sum.peak < 5 * output


def test_a_wide_convolution_of_small_images():
    """Where inner products of positions pay, windows are cut out a few examples at a time."""
    model, x = nn.Conv2d(256, 256, 3, padding=1), torch.randn(64, 256, 4, 4)
    fn = pexgrad.per_example_grad_norm(model, total)
    assert fn.explain(named(model), x).lines[0].norms == "gram"
    windows, rows = bytes_of(64, 16, 256, 9), bytes_of(64, 256, 256, 9)
    assert windows < rows
    assert allocations(lambda: fn(named(model), x)).largest < windows


def test_rows_where_nothing_else_is_cheaper_come_in_pieces():
    model, x = nn.Linear(300, 300), torch.randn(64, 400, 300)
    fn = pexgrad.per_example_grad_norm(model, total)
    assert "rows in pieces" in fn.explain(named(model), x).lines[0].norms
    seen = allocations(lambda: fn(named(model), x))
    assert seen.largest <= bytes_of(64, 400, 300)  # the output, which is larger than a piece
    assert bytes_of(64, 400, 300) > 8 * MB


# --- one table for both ends of a language model ------------------------------------------------------

V, D = 20_000, 64
HEADS = {
    "linear": lambda h, w: F.linear(h, w),
    "transpose": lambda h, w: h @ w.T,
    "einsum": lambda h, w: torch.einsum("btd,vd->btv", h, w),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_tied_embedding_and_head(head):
    model = Net(
        lambda s, i: HEADS[head](s.mix(s.emb(i)), s.emb.weight), emb=nn.Embedding(V, D), mix=nn.Linear(D, D)
    )
    ids, row, logits = torch.randint(V, (16, 2)), bytes_of(V, D), bytes_of(16, 2, V)
    assert logits < row
    params, jacobian = named(model), pexgrad.per_example_jacobian(model, total)
    assert allocations(lambda: jacobian(params, ids).norms()).largest <= logits
    other = jacobian(params, ids[:5])
    assert allocations(lambda: jacobian(params, ids).gram(other)).largest <= logits
    fn = pexgrad.clipped_grad(model, total, max_norm=1.0)
    assert allocations(lambda: fn(params, ids)).largest <= row  # the result has the table's size


def test_a_clipped_sum_of_a_transformer_makes_no_rows_of_its_weights():
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(500, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 50))
    ids = torch.randint(500, (64, 8))
    fn = pexgrad.clipped_grad(model, total, max_norm=1.0)
    seen = allocations(lambda: fn(named(model), ids))
    assert seen.largest <= bytes_of(64, 8, 256)  # an activation
    assert all(seen.largest < bytes_of(64, *p.shape) for p in model.parameters() if p.dim() > 1)


# --- streams ------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 10))
JACOBIAN, NORM = pexgrad.per_example_jacobian(MODEL), pexgrad.per_example_grad_norm(MODEL)
TEST = torch.randn(2, 30), torch.zeros(2, dtype=torch.long)
STREAMS = {  # with the number of floats that the result has for each example
    "moments": (0, lambda params, batches: pexgrad.dataset_moments(JACOBIAN, params, batches)),
    "fisher": (0, lambda params, batches: pexgrad.fisher_diagonal(JACOBIAN, params, batches)),
    "grand": (1, lambda params, batches: pexgrad.grand_scores(NORM, [params], batches)),
    "tracin": (2, lambda params, batches: pexgrad.tracin(JACOBIAN, [params], batches, TEST)),
    "norms": (1, lambda params, batches: pexgrad.over_loader(NORM, batches)(params)),
    "projections": (
        2,
        lambda params, batches: pexgrad.over_loader(JACOBIAN, batches, reduce=projected)(params),
    ),
}


def projected(jacobian):
    return pexgrad.project(jacobian, 2)


@pytest.mark.parametrize("name", STREAMS)
def test_memory_does_not_grow_with_the_data_set(name):
    """Ten times the batches, behind a progress bar, take the memory of one, and of the numbers returned."""
    tqdm = pytest.importorskip("tqdm").tqdm
    floats, stream = STREAMS[name]

    def peak(batches):
        data = [(torch.randn(16, 30), torch.randint(10, (16,))) for _ in range(batches)]
        copies = ((x.clone(), y.clone()) for x, y in data)  # allocated as a loader would
        stream(named(MODEL), data[:1])
        with Allocations() as seen:
            stream(named(MODEL), tqdm(copies, name, disable=None, leave=False))
        return seen.peak - 2 * bytes_of(16 * batches, floats)  # parts, and all of them joined

    assert peak(20) < peak(4) + bytes_of(16, 30)  # less than one more batch


def test_a_loader_is_streamed():
    pytest.importorskip("tqdm")
    from tqdm import tqdm

    data = TensorDataset(torch.randn(50, 30), torch.randint(10, (50,)))
    loader = DataLoader(data, batch_size=16)
    norms = pexgrad.over_loader(NORM, tqdm(loader, "norms", disable=None, leave=False))(named(MODEL))
    torch.testing.assert_close(norms, NORM(named(MODEL), *data.tensors))
