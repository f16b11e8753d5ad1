"""What the model's own code leaves behind it and how it draws random numbers, before it is traced."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.nn as nn
from cases.case import Net, labels
from oracle import assert_rows_equal, rows_of

import pexgrad

pytestmark = pytest.mark.usefixtures("double")


def named(model):
    return dict(model.named_parameters())


def linear():
    return nn.Linear(6, 3)


@functools.lru_cache
def mask(n):
    return torch.ones(n, n).tril()


TABLES = {}


def table(n):
    if n not in TABLES:
        TABLES[n] = torch.arange(n).cos()
    return TABLES[n]


def test_what_code_keeps_outside_of_the_model_stays_a_tensor():
    mask.cache_clear()
    TABLES.clear()
    model = Net(lambda s, x: s.lin(mask(x.shape[1]) @ x * table(x.shape[2])), lin=linear())
    x = torch.randn(5, 4, 6)

    def loss(out, _):
        return out.sin().flatten(1).sum(1)

    rows = pexgrad.per_example_grad(model, loss)(named(model), x)
    assert type(mask(4)) is type(table(6)) is torch.Tensor and mask(4).sum() == 10
    assert_rows_equal(rows, rows_of(model, loss, x, None))


def forked(s, x):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return s.lin(x * torch.rand(6))


def seeded(s, x):
    torch.manual_seed(3)
    return s.lin(x * torch.rand(6))


def made_anew(s, x):
    return s.lin(x * torch.rand(6, generator=torch.Generator().manual_seed(0)))


def held_and_seeded(s, x):
    return s.lin(x * torch.rand(6, generator=s.generator.manual_seed(1)))


GENERATORS = pytest.mark.skipif(  # refused before
    torch.__version__ < "2.12", reason="no generator in a graph"
)


@pytest.mark.parametrize(
    "forward", [forked, seeded, *(pytest.param(f, marks=GENERATORS) for f in (made_anew, held_and_seeded))]
)
def test_code_that_seeds(forward):
    model = Net(forward, lin=linear(), generator=torch.Generator())
    state = torch.get_rng_state()
    with pytest.raises(pexgrad.TraceError, match="seeds random numbers"):
        pexgrad.per_example_grad(model)(named(model), torch.randn(4, 6), labels(4, 3))
    torch.set_rng_state(state)
    x = torch.randn(4, 6)
    want = rows_of(model, nn.functional.cross_entropy, x, labels(4, 3))
    assert_rows_equal(pexgrad.per_example_grad(model, strategy="naive")(named(model), x, labels(4, 3)), want)


@pytest.mark.parametrize("forward", [forked, seeded])
def test_a_refusal_leaves_the_random_numbers_as_they_were(forward):
    model, x = Net(forward, lin=linear()), torch.randn(4, 6)
    state = torch.get_rng_state()
    with pytest.raises(pexgrad.TraceError, match="seeds random numbers"):
        pexgrad.per_example_grad(model)(named(model), x, labels(4, 3))
    assert torch.equal(torch.get_rng_state(), state)


@GENERATORS
def test_a_generator_that_the_model_holds_goes_on():
    model = Net(lambda s, x: s.lin(x * torch.rand(6, generator=s.generator)), lin=linear())
    model.generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(4, 6), labels(4, 3)
    fn = pexgrad.per_example_grad(model)
    fn(named(model), x, y)
    state = model.generator.get_state()
    rows = [fn(named(model), x, y) for _ in range(2)]
    model.generator.set_state(state)
    for got in rows:
        noise = torch.rand(6, generator=model.generator)
        want = rows_of(
            Net(lambda s, x, noise=noise: s.lin(x * noise), lin=model.lin), nn.functional.cross_entropy, x, y
        )
        assert_rows_equal(got, want)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_drawn_with_python(draw):
    model, x = Net(lambda s, x: s.lin(x) * (1 + draw()), lin=linear()), torch.randn(4, 6)
    with pytest.raises(pexgrad.TraceError, match="draws from Python's or NumPy's"):
        pexgrad.per_example_grad(model)(named(model), x, labels(4, 3))
    rows = pexgrad.per_example_grad(model, strategy="naive")(named(model), x, labels(4, 3))
    assert all(r.isfinite().all() for r in rows.values())


@pytest.mark.parametrize(
    "generator",
    [lambda: random.Random(0), lambda: np.random.default_rng(0), lambda: np.random.RandomState(0)],
    ids=["Python", "NumPy", "NumPy of old"],
)
@pytest.mark.parametrize("held", ["attribute", "list", "closure"])
def test_numbers_drawn_from_a_generator_of_the_models_own(generator, held):
    rng = generator()
    draw = (lambda g: g.random()) if hasattr(rng, "random") else (lambda g: g.rand())
    model = Net(lambda s, x: s.lin(x) * draw(rng if held == "closure" else s.rng[0]), lin=linear())
    model.rng = [] if held == "closure" else [rng]
    if held == "attribute":
        model = Net(lambda s, x: s.lin(x) * draw(s.rng), lin=model.lin)
        model.rng = rng
    x, y = torch.randn(4, 6), labels(4, 3)
    drawn = draw(copy.deepcopy(rng))
    with pytest.raises(pexgrad.TraceError, match="draws from Python's or NumPy's"):
        pexgrad.per_example_grad(model)(named(model), x, y)
    assert draw(rng) == drawn, "a refusal draws nothing"
    fn = pexgrad.per_example_grad(model, strategy="naive")
    first, second = (fn(named(model), x, y)["lin.weight"] for _ in range(2))
    assert not torch.allclose(first, second), "the next draws"


def test_a_generator_that_does_not_tell_what_was_drawn():
    model = Net(lambda s, x: s.lin(x), lin=linear())
    model.rng = random.SystemRandom()
    x, y = torch.randn(4, 6), labels(4, 3)
    with pytest.raises(pexgrad.TraceError, match=r"holds a random\.SystemRandom"):
        pexgrad.per_example_grad(model)(named(model), x, y)
    rows = pexgrad.per_example_grad(model, strategy="naive")(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, torch.nn.functional.cross_entropy, x, y))
