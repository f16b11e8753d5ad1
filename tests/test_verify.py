"""The check of a new trace against the definition: what it refuses, and what it knows to be rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from cases.case import labels

import pexgrad
from pexgrad.base.compare import Differences, largest_error, moved
from pexgrad.calls import traces
from pexgrad.definition import verify
from pexgrad.flat.lowered import Lowered

NAME = "0.weight"


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model, dict(model.named_parameters()), torch.randn(4, 6), labels(4, 3)


def definition_with(monkeypatch, part, points):
    """Let the definition differ by a part of one gradient at the first points that it is asked for."""
    asked = []

    def one_by_one(model, loss, at):
        key = [p.detach().clone() for p in at.params.values()]
        if not any(all(map(_near, key, other)) for other in asked):
            asked.append(key)
        wrong = len(asked) <= points
        for value, row in real(model, loss, at):
            yield value, row | {NAME: row[NAME] * (1 + part)} if wrong else row

    real = verify.one_by_one
    monkeypatch.setattr(verify, "one_by_one", one_by_one)
    return asked


def _near(p, other):
    """The same but for a rounding or two."""
    return torch.allclose(p, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("points", [1, 2])
def test_a_branch_on_which_rounding_decides_at_one_point(monkeypatch, points):
    model, params, x, y = small()
    asked = definition_with(monkeypatch, 0.05, points)
    rows = pexgrad.per_example_grad(model)(params, x, y)
    assert len(asked) == points + 1 and all(r.isfinite().all() for r in rows.values())


@pytest.mark.parametrize(
    ("part", "points", "looked"), [(0.05, 9, 3), (0.006, 9, 3), (0.5, 1, 1), (-1.0, 1, 1)]
)
def test_what_is_wrong_everywhere_or_by_much_is_refused(monkeypatch, part, points, looked):
    model, params, x, y = small()
    asked = definition_with(monkeypatch, part, points)
    with pytest.raises(pexgrad.VerificationError, match=f"the gradient of '{NAME}' differs"):
        pexgrad.per_example_grad(model)(params, x, y)
    assert len(asked) == looked


@pytest.mark.parametrize(("part", "points", "refused"), [(0.05, 1, False), (0.05, 9, True), (0.5, 1, True)])
def test_a_branch_in_the_flat_graph(monkeypatch, part, points, refused):
    model, params, x, y = small()
    fn, calls = pexgrad.per_example_grad(model), []

    def run(lowered, flat):
        calls.append(None)
        results = real(lowered, flat)
        return {k: r * (1 + part) for k, r in results.items()} if len(calls) <= points else results

    real = Lowered.run
    monkeypatch.setattr(Lowered, "run", run)
    if refused:
        with pytest.raises(pexgrad.VerificationError, match="the flat graph of this call differs"):
            fn.lower(params, x, y)
    else:
        fn.lower(params, x, y)
    assert len(calls) == (3 if points > 1 else 1 if refused else 2)


@pytest.mark.parametrize("missing", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_hides_nothing_beside_it(missing):
    want = {"w": torch.tensor([missing, 1.0, 2.0]), "v": torch.ones(2)}
    assert largest_error(want, want) is None
    assert largest_error(want | {"w": torch.tensor([missing, 1.0, 2.5])}, want)[0] == "w"
    assert largest_error(want | {"v": torch.tensor([1.0, 2.0])}, want)[0] == "v"
    assert largest_error(want | {"w": torch.tensor([1.0, 1.0, 2.0])}, want) == ("w", float("inf"))


def test_large_tensors_are_compared_to_the_last_number():
    want = torch.ones(2, (1 << 20) + 3)
    got = want.clone()
    assert largest_error({"w": got}, {"w": want}) is None and telling(got) == (True, {"w"})
    got[1, -1] = 1e3
    assert largest_error({"w": got}, {"w": want}) == ("w", pytest.approx(999 / want.norm().item(), rel=1e-3))
    got[1, -1] = float("nan")
    assert largest_error({"w": got}, {"w": want}) == ("w", float("inf")) and telling(got) == (False, set())


def telling(*parts):
    """Whether an entry of these parts should be finite, and whether it tells something."""
    differences = Differences()
    for part in parts:
        differences.add("w", part, part)
    return differences.are_of_numbers(), differences.telling()


def test_what_tells_something():
    zero, one, missing = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([1.0, float("-inf")])
    assert telling(zero, zero) == (True, set())
    assert telling(zero, one) == telling(one, zero) == (True, {"w"})
    assert telling(one, missing) == telling(missing, one) == (False, set())
    # numbers whose squares are out of range are finite
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert telling(torch.full((2,), torch.finfo(dtype).max, dtype=dtype)) == (True, {"w"})


@pytest.mark.parametrize("split", [1, 2, 3])
def test_parts_of_an_entry_are_measured_together(split):
    want, got = torch.tensor([1.0, 2e3, 3.0, 4.0]), torch.tensor([1.5, 2e3, 3.0, 4.0])
    for near, far in ((want, got), (got, want)):
        differences = Differences()
        for a, b in zip(near.split(split), far.split(split), strict=True):
            differences.add("w", a, b)
        assert differences.largest() is None  # 0.5 of 1 alone, and of 2,000 together
    differences.add("w", torch.tensor([1e3]), torch.tensor([0.0]))
    assert differences.largest() == ("w", pytest.approx(0.5, rel=1e-3))


def test_differences_beyond_the_range_of_the_dtype():
    large = torch.tensor([3e38, -3e38])
    name, error = largest_error({"w": large}, {"w": -large})
    assert name == "w" and error == pytest.approx(2)
    assert largest_error({"w": large}, {"w": large.clone()}) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_numbers_changed_by_one_rounding_of_their_own(dtype):
    ones = torch.ones(4, dtype=dtype)
    changed = moved(ones, torch.finfo(dtype).eps)
    assert changed.dtype == dtype and bool((changed != ones).all())


# --- what the first batch does not tell -----------------------------------------------------------


def scaled_by_its_node(h):
    h = h * 1
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
    return h


def saved_in_another_form(h):
    with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda t: t):
        return h**2


class Odd(nn.Module):
    """Whose backward is not that of its operations, where `how` says so."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(5, 4), nn.Linear(4, 3), how

    def forward(self, x):
        return self.b(self.how(torch.relu(self.a(x))))


def weighted(out, y):
    return F.cross_entropy(out, y[0], reduction="none") * y[1]


def told_late(first):
    """A batch whose gradients are zero or no numbers, `first`, and one like any."""
    x, y = torch.randn(6, 5), (labels(6, 3), torch.ones(6))
    if first == "weights of zero":
        return (x, (y[0], torch.zeros(6))), (x, y)
    return (x + float("nan") if first == "nan" else x, y), (x, y)


@pytest.mark.parametrize("how", [scaled_by_its_node, saved_in_another_form])
@pytest.mark.parametrize("first", ["weights of zero", "nan", "dead units"])
def test_a_first_batch_that_tells_nothing(how, first):
    model = Odd(how)
    fn = pexgrad.per_example_grad(model, weighted)
    nothing, like_any = told_late(first)
    params = dict(model.named_parameters())
    dead = params | {"a.bias": params["a.bias"].detach() - 1e3} if first == "dead units" else params
    fn(dead, *nothing)
    for _ in range(2):
        with pytest.raises(pexgrad.VerificationError, match="the gradient of"):
            fn(params, *like_any)


def test_a_trace_that_is_right_is_told_of_and_kept(monkeypatch):
    model = Odd(torch.tanh)
    fn = pexgrad.per_example_grad(model, weighted)
    asked = []
    monkeypatch.setattr(traces, "verify", lambda *a: (asked.append(1), verify.verify(*a))[1])
    nothing, like_any = told_late("weights of zero")
    params = dict(model.named_parameters())
    for batch in [nothing] * 40 + [like_any] * 40:
        fn(params, *batch)
    # once at first, 16 times more, then at 32 and at 64, where a gradient tells
    assert len(asked) == 1 + 16 + 2 and fn.trace_count == 1
    for _ in range(70):
        fn(params, *like_any)
    assert len(asked) == 1 + 16 + 2


def test_a_later_batch_at_which_the_model_fails_elsewhere(monkeypatch):
    """Parameters a little different from the given ones may be out of the model's domain."""
    model = Odd(torch.tanh)
    fn = pexgrad.per_example_grad(model, weighted)
    nothing, like_any = told_late("weights of zero")
    params = dict(model.named_parameters())
    fn(params, *nothing)

    def out_of_domain(*arguments):
        raise torch.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(traces, "verify", out_of_domain)
    assert all(r.isfinite().all() for r in fn(params, *like_any).values())


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12, 1e30])
def test_differences_are_found_at_any_size_of_numbers(size):
    want = size * torch.randn(1000)
    got = want.clone()
    assert largest_error({"w": got}, {"w": want}) is None
    got[3] += 0.1 * want.double().norm().float()
    assert largest_error({"w": got}, {"w": want}) == ("w", pytest.approx(0.1, rel=1e-2))
    assert telling(want) == telling(1e-30 * want / size) == (True, {"w"})
