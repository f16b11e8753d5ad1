"""Recurrent layers, of whose steps over time two are traced and the others are copies."""

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows_equal, rows_of

import pexgrad
from pexgrad.tracing import unrolled

pytestmark = pytest.mark.usefixtures("double")

KINDS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "tanh": lambda: nn.RNN(3, 4, batch_first=True),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False),
    "projected": lambda: nn.LSTM(3, 5, proj_size=4, batch_first=True),
    "both ways": lambda: nn.LSTM(3, 2, 2, bidirectional=True, batch_first=True),
    "gru both ways": lambda: nn.GRU(3, 2, 2, bidirectional=True),
}


class Reader(nn.Module):
    """Reads the outputs and the last state of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x):
        out, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        last = last[0] if isinstance(last, tuple) else last
        out = out if self.layer.batch_first else out.transpose(0, 1)
        place = torch.arange(1, x.shape[1] + 1)
        return self.head((out * place[:, None]).sum(1)) + last.pow(2).sum((0, 2))[:, None]


def squares(out, y):
    return (out - y).square().sum(1)


def case(kind, t):
    torch.manual_seed(0)
    model = Reader(KINDS[kind]())
    return model, dict(model.named_parameters()), torch.randn(4, t, 3), torch.randn(4, 3)


@pytest.mark.parametrize("t", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, t):
    model, params, x, y = case(kind, t)
    fn, want = pexgrad.per_example_grad(model, squares), rows_of(model, squares, x, y)
    assert_rows_equal(fn(params, x, y), want)
    if t == 3:
        assert_rows_equal(fn.lower(params, x, y)(params, x, y), want)


@pytest.mark.parametrize("kind", ["projected", "gru"])
def test_second_derivatives(kind):
    model, params, x, y = case(kind, 5)
    total = {}
    for strategy in ("crb", "naive"):
        fn = pexgrad.per_example_grad(model, squares, strategy=strategy, create_graph=True)
        norms = sum(r.square().sum() for r in fn(params, x, y).values())
        total[strategy] = dict(zip(params, torch.autograd.grad(norms, list(params.values())), strict=True))
    assert_rows_equal(total["crb"], total["naive"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_is_that_of_all_steps_traced(kind, monkeypatch):
    copies = []
    copy = unrolled._Graph.copy
    monkeypatch.setattr(unrolled._Graph, "copy", lambda *args: copies.append(None) or copy(*args))

    def ops():
        model, params, x, y = case(kind, 5)
        fn = pexgrad.per_example_grad(model, squares)
        fn(params, x, y)
        (pipeline,) = fn._traces
        nodes = pipeline.trace.graph.nodes
        shapes = [getattr(n.meta.get("val"), "shape", None) for n in nodes]
        return [(n.op, str(n.target), str(s), n.meta.get("path")) for n, s in zip(nodes, shapes, strict=True)]

    copied = ops()
    assert len(copies) > 5
    monkeypatch.setattr(unrolled, "get_proxy_mode", lambda: None)
    traced = ops()
    assert sorted(map(str, copied)) == sorted(map(str, traced))
    assert len(copied) > 30


def test_outputs_that_are_written_into():
    class Written(Reader):
        def forward(self, x):
            out, (h, c) = self.layer(x)
            h.mul_(2)
            out[:, 1:-1] += c[-1][:, None]
            out.tanh_()
            return self.head(out.sum(1)) + h.sum((0, 2))[:, None]

    torch.manual_seed(0)
    model, x, y = Written(nn.LSTM(3, 4, batch_first=True)), torch.randn(4, 6, 3), torch.randn(4, 3)
    rows = pexgrad.per_example_grad(model, squares)(dict(model.named_parameters()), x, y)
    assert_rows_equal(rows, rows_of(model, squares, x, y))


def test_under_autocast():
    model, _, x, y = case("gru", 6)
    model, x, y = model.float(), x.float(), y.float()
    params = dict(model.named_parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = pexgrad.per_example_grad(model, squares)(params, x, y)
        want = pexgrad.per_example_grad(model, squares, strategy="naive")(params, x, y)
    for k, r in rows.items():
        assert (r - want[k]).norm() <= 0.1 * want[k].norm()


def test_steps_over_the_batch_are_refused():
    """A layer that takes dimension 0 for time goes from one example to the next."""
    model = nn.RNN(3, 4)
    with pytest.raises(pexgrad.PexgradError):
        pexgrad.per_example_grad(lambda p, x: torch.func.functional_call(model, p, (x,))[0], squares)(
            dict(model.named_parameters()), torch.randn(4, 3), torch.randn(4, 4)
        )
