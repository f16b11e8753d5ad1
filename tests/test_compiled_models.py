"""Models that are compiled, as a whole or in part: the same rows, and no compiler at work for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import Net, labels
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """One that has not given up on code which many tests compile."""
    torch.compiler.reset()


def backend(graph, _):
    """Nothing of a model is to be compiled for its rows."""
    raise AssertionError("compiled")


def compiled(thing):
    return torch.compile(thing, backend=backend)


def layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))


def whole():
    return compiled(layers())


def in_place():
    model = layers()
    model.compile(backend=backend)
    return model


def child():
    return nn.Sequential(compiled(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 5))


def function_inside():
    gate = compiled(lambda h: torch.tanh(h) * h.sigmoid())
    return Net(lambda s, x: s.b(gate(s.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 5))


def closure_over_a_layer():
    net = Net(lambda s, x: s.b(s.inner(x)), a=nn.Linear(4, 6), b=nn.Linear(6, 5))
    net.inner = compiled(lambda x: torch.tanh(net.a(x)))
    return net


@pytest.mark.parametrize("make", [whole, in_place, child, function_inside, closure_over_a_layer])
def test_rows_of_a_compiled_model(make):
    torch.manual_seed(0)
    model = make()
    params = dict(model.named_parameters())
    x, y = torch.randn(3, 4), labels(3)
    fn = pexgrad.per_example_grad(model)
    rows = [fn(params, x, y) for _ in range(2)]
    with torch.compiler.set_stance("force_eager"):
        want = rows_of(model, F.cross_entropy, x, y)
    for got in rows:
        assert_rows_equal(got, want)
    assert fn.trace_count == 1


def test_a_compiled_function_of_parameters():
    f = compiled(lambda p, x: torch.tanh(x @ p["w"]))
    params, x, y = {"w": torch.randn(4, 5)}, torch.randn(3, 4), labels(3)
    want = pexgrad.per_example_grad(lambda p, x: torch.tanh(x @ p["w"]), strategy="naive")(params, x, y)
    assert_rows_equal(pexgrad.per_example_grad(f)(params, x, y), want)


def test_a_compiled_loss_under_vmap():
    model = layers()
    params = dict(model.named_parameters())
    loss = torch.compile(lambda out, y: F.cross_entropy(out, y, reduction="none"), backend="aot_eager")
    fn = pexgrad.per_example_grad(model, loss)
    x, y = torch.randn(2, 3, 4), labels(3)
    rows = torch.func.vmap(lambda x: fn(params, x, y))(x)
    for i in range(2):
        assert_rows_equal({k: r[i] for k, r in rows.items()}, rows_of(model, F.cross_entropy, x[i], y))


def test_torch_compile_works_as_before_after_a_trace_and_after_a_failed_one():
    model, x, y = whole(), torch.randn(3, 4), labels(3)
    pexgrad.per_example_grad(model)(dict(model.named_parameters()), x, y)
    with pytest.raises(Exception, match="compiled"):
        model(x)
    mixing = compiled(Net(lambda s, x: s.lin(x - x.mean(0)), lin=nn.Linear(4, 5)))
    with pytest.raises(pexgrad.MixedExamplesError):
        pexgrad.per_example_grad(mixing)(dict(mixing.named_parameters()), x, y)
    with pytest.raises(Exception, match="compiled"):
        mixing(x)
