"""Clipped sums: every way to clip against its definition from rows, masks, and noise."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections import Counter

import pytest
import torch
from answers import or_refused
from cases.case import labels
from models import each, pick, select
from oracle import assert_rows_equal, copied, losses_of, norms_of, rows_of
from torch.utils._python_dispatch import TorchDispatchMode

import pexgrad
from pexgrad.extend import replaced
from pexgrad.operator.jacobian import Jacobian
from pexgrad.stages.layout import Anywhere

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = pytest.mark.parametrize("strategy", ["crb", "multi", "naive"])


def named(model):
    return dict(model.named_parameters())


def summed(rows, weights):
    """The weighted sum; weights (B,), or by parameter."""
    if isinstance(weights, torch.Tensor):
        weights = dict.fromkeys(rows, weights)
    return {k: torch.tensordot(weights[k].to(r.dtype), r, 1) for k, r in rows.items()}


def flat_weights(norms, bound):
    return 1 / (norms / bound).clamp(min=1)


KINDS = {
    c.name: c
    for tag in ("tied", "prelude", "embedding", "frozen", "raw", "half", "output")
    for c in select(tag)
}
FEW = pick("""
    mlp cnn_of_the_paper conv2d_every_argument conv_transpose2d layer_norm tied_embedding_and_head weight_norm
    losses_over_tokens time_inside_the_batch lstm_cell_in_a_loop
""")


@each([*KINDS.values(), *(c for c in FEW if c.name not in KINDS)])
def test_clipped_sum(case):
    model, x, y, loss = case.build()
    rows = rows_of(model, loss, x, y)
    norms = norms_of(rows)
    bound = norms.median().item()  # clips some examples and leaves others
    fn = pexgrad.clipped_grad(model, loss, max_norm=bound)
    out = or_refused(case, lambda: fn(named(model), copied(x), copied(y)))
    assert_rows_equal(out.grads, summed(rows, flat_weights(norms, bound)), case.tol)
    near = {"rtol": case.tol, "atol": case.tol, "check_dtype": False}
    torch.testing.assert_close(out.norms, norms, **near)
    torch.testing.assert_close(out.losses, losses_of(model, loss, x, y), **near)


@STRATEGIES
@pytest.mark.parametrize("chunk_size", [None, 2])
@each(FEW)
def test_every_strategy_and_chunks(case, chunk_size, strategy):
    model, x, y, loss = case.build(5)
    rows = rows_of(model, loss, x, y)
    norms = norms_of(rows)
    bound = norms.median().item()
    fn = pexgrad.clipped_grad(model, loss, max_norm=bound, strategy=strategy, chunk_size=chunk_size)
    out = fn(named(model), x, y)
    assert_rows_equal(out.grads, summed(rows, flat_weights(norms, bound)), case.tol)
    torch.testing.assert_close(out.norms, norms)
    torch.testing.assert_close(out.losses, losses_of(model, loss, x, y))


@STRATEGIES
def test_sums_lie_in_memory_of_their_own(strategy):
    """Noise added to one in place would be in another's too."""
    params = {k: torch.randn(3) for k in "abcd"}
    fn = pexgrad.clipped_grad(lambda p, x: (x + p["a"] + p["b"]) * p["c"], max_norm=1.0, strategy=strategy)
    out = fn(params, torch.randn(5, 3), torch.arange(5) % 3)
    lie = {t.untyped_storage().data_ptr() for t in (*out.grads.values(), out.norms, out.losses)}
    assert len(lie) == 6
    assert all(g.is_contiguous() for g in out.grads.values())


@STRATEGIES
def test_an_empty_batch_sums_to_zero(strategy):
    model = torch.nn.Linear(4, 5)
    out = pexgrad.clipped_grad(model, max_norm=1.0, strategy=strategy)(
        named(model), torch.randn(0, 4), labels(0)
    )
    assert out.norms.shape == out.losses.shape == (0,)
    assert {k: g.shape for k, g in out.grads.items()} == {k: p.shape for k, p in model.named_parameters()}
    assert not any(g.any() for g in out.grads.values())


def test_small_rows_are_left_alone_and_large_ones_are_bounded():
    model, x, y = torch.nn.Linear(4, 5), torch.randn(6, 4), labels(6)
    rows = rows_of(model, torch.nn.functional.cross_entropy, x, y)
    loose = pexgrad.clipped_grad(model, max_norm=1e6)(named(model), x, y)
    assert_rows_equal(loose.grads, {k: r.sum(0) for k, r in rows.items()})
    tight = pexgrad.clipped_grad(model, max_norm=1e-3)(named(model), x[:1], y[:1])
    norm = sum(g.square().sum() for g in tight.grads.values()).sqrt()
    torch.testing.assert_close(norm, torch.tensor(1e-3))


@pytest.mark.parametrize("how", ["flat", "per_parameter", "automatic"])
def test_a_row_of_norm_zero_does_not_become_nan(how):
    model = torch.nn.Linear(4, 1)
    fn = pexgrad.clipped_grad(model, lambda out, y: out[:, 0] * y, max_norm=1.0, clip=how)
    out = fn(named(model), torch.randn(3, 4), torch.tensor([0.0, 1.0, 0.0]))
    assert out.norms[0] == 0
    assert all(g.isfinite().all() for g in out.grads.values())


@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_weights_do_not_vanish_in_half_precision(dtype, rule):
    """Here 1 / max(1, |g| / C) is below what float16 can hold."""
    model, x = torch.nn.Linear(8, 8).to(dtype), (torch.randn(6, 5, 8) * 3).to(dtype)
    loss = lambda out, y: (out.float() * 100).flatten(1).sum(1)  # noqa: E731
    rows = {k: r.float() for k, r in rows_of(model, loss, x, None).items()}
    linear = torch.ops.aten.linear.default
    with contextlib.nullcontext() if rule else replaced(linear, "weight", None):
        out = pexgrad.clipped_grad(model, loss, max_norm=1e-3)(named(model), x)
    assert out.norms.dtype == torch.float32
    assert_rows_equal(
        {k: g.float() for k, g in out.grads.items()}, summed(rows, flat_weights(norms_of(rows), 1e-3)), 0.01
    )


def test_sums_of_cotangents_by_small_weights():
    """Those of copies of parameters that any example may use, (b, *shape)."""
    x, weights = torch.full((3, 4, 2), 1e4).half(), torch.tensor([1e-8, 2e-8, 3e-8])
    torch.testing.assert_close(Anywhere().scale(x, weights), torch.full((4, 2), 6e-4).half())


def test_derivatives_where_a_norm_is_zero():
    model, x = torch.nn.Linear(4, 1), torch.randn(3, 4, requires_grad=True)
    for options in ({"clip": "per_parameter"}, {"clip": "automatic"}, {}):
        fn = pexgrad.clipped_grad(
            model, lambda out, y: out[:, 0] * y, max_norm=0.5, create_graph=True, **options
        )
        out = fn(named(model), x, torch.tensor([0.0, 1.0, 2.0]))
        value = out.norms.sum() + sum(g.square().sum() for g in out.grads.values())
        assert torch.autograd.grad(value, x)[0].isfinite().all()


def test_nothing_to_differentiate():
    model = torch.nn.Linear(4, 5).requires_grad_(False)
    for how in ("flat", "per_parameter", "automatic"):
        out = pexgrad.clipped_grad(model, max_norm=1.0, clip=how)(named(model), torch.randn(3, 4), labels(3))
        assert out.grads == {} and out.norms.tolist() == [0, 0, 0]


# --- one forward, one backward --------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """How often each operation is run."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


WAYS = {
    "flat": {"max_norm": 0.5},
    "per_parameter": {"max_norm": 0.5, "clip": "per_parameter"},
    "groups": {"max_norm": {"*.weight": 0.3, "*.bias": 0.5, "*.original?": 0.1}},
    "automatic": {"max_norm": 0.5, "clip": "automatic"},
    "function": {"clip": lambda norms: 1 / (1 + norms)},
}


@pytest.mark.parametrize("how", WAYS)
def test_one_forward_and_one_backward(how):
    """The activation functions tell: each is run once in each direction, whatever is clipped, and however."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.Tanh(),
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 6)),
        torch.nn.Tanh(),
        torch.nn.LayerNorm(6),
        torch.nn.Linear(6, 5),
        torch.nn.Tanh(),
    )
    x, y = torch.randn(6, 3, 4), labels(6)
    fn = pexgrad.clipped_grad(model, lambda out, y: out.square().sum((1, 2)) * y, **WAYS[how])
    fn(named(model), x, y)
    with Calls() as calls:
        fn(named(model), x, y)
    assert calls.of["tanh"] == calls.of["tanh_backward"] == 3
    assert calls.of["native_layer_norm_backward"] == 1
    with Calls() as calls:
        pexgrad.clipped_grad(
            model, lambda out, y: out.square().sum((1, 2)) * y, **WAYS[how], strategy="naive"
        )(named(model), x, y)
    assert calls.of["tanh"] == 6 * 3  # the count is one


# --- ways to clip ---------------------------------------------------------------------------------


def problem():
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 5))
    x, y = torch.randn(6, 4), labels(6)
    return model, x, y, rows_of(model, torch.nn.functional.cross_entropy, x, y)


def test_each_parameter_by_itself():
    model, x, y, rows = problem()
    fn = pexgrad.clipped_grad(model, max_norm=0.8, clip="per_parameter")
    weights = {k: flat_weights(norms_of({k: r}), 0.8 / len(rows) ** 0.5) for k, r in rows.items()}
    out = fn(named(model), x, y)
    assert_rows_equal(out.grads, summed(rows, weights))
    torch.testing.assert_close(out.norms, norms_of(rows))
    assert fn.sensitivity == pytest.approx(0.8)


@pytest.mark.parametrize("groups", [{"0": 0.3, "2": 0.5}, {"*.weight": 0.3, "*.bias": 0.5}])
def test_groups_with_bounds_of_their_own(groups):
    model, x, y, rows = problem()
    fn = pexgrad.clipped_grad(model, max_norm=groups)
    weights = {}
    for pattern, bound in groups.items():
        members = {
            k: r
            for k, r in rows.items()
            if k.startswith(pattern + ".") or k.endswith(pattern.removeprefix("*"))
        }
        weights |= dict.fromkeys(members, flat_weights(norms_of(members), bound))
    assert_rows_equal(fn(named(model), x, y).grads, summed(rows, weights))
    assert fn.sensitivity == pytest.approx((0.3**2 + 0.5**2) ** 0.5)


def test_what_rows_were_kept_of_is_let_go(monkeypatch):
    """Before the weighted sum: it holds every activation and every cotangent."""
    model, x, y, _ = problem()
    keep, vjp = Jacobian.keep, Jacobian.vjp
    whole, held = [], []
    monkeypatch.setattr(Jacobian, "keep", lambda self: whole.append(weakref.ref(self)) or keep(self))
    monkeypatch.setattr(Jacobian, "vjp", lambda self, w: held.append(whole[-1]() is not None) or vjp(self, w))
    pexgrad.clipped_grad(model, max_norm=0.8)(named(model), x, y)
    assert held == [False]


def test_bounds_stay_what_the_sensitivity_says():
    model, x, y, _ = problem()
    bounds = {"0": 0.3, "2": 0.5}
    fn = pexgrad.clipped_grad(model, max_norm=bounds)
    want, sensitivity = fn(named(model), x, y).grads, fn.sensitivity
    bounds["0"] = 100.0
    assert_rows_equal(fn(named(model), x, y).grads, want)
    assert fn.sensitivity == sensitivity


def test_automatic_normalises():
    model, x, y, rows = problem()
    fn = pexgrad.clipped_grad(model, max_norm=2.0, clip="automatic")
    assert_rows_equal(fn(named(model), x, y).grads, summed(rows, 2.0 / (norms_of(rows) + 0.01)))


def test_a_function_from_norms_to_weights():
    model, x, y, rows = problem()
    fn = pexgrad.clipped_grad(model, clip=lambda norms: (norms > norms.median()).to(norms.dtype) / 3)
    norms = norms_of(rows)
    assert_rows_equal(fn(named(model), x, y).grads, summed(rows, (norms > norms.median()).double() / 3))
    assert fn.sensitivity is None


@pytest.mark.parametrize("how", ["flat", "per_parameter", "automatic", "groups"])
def test_what_one_example_adds_is_within_the_sensitivity(how):
    """Without an example, the sum differs by no more than the function says."""
    model, x, y, _ = problem()
    options = {"max_norm": {"0": 0.1, "2": 0.2}} if how == "groups" else {"max_norm": 0.1, "clip": how}
    fn = pexgrad.clipped_grad(model, **options)
    whole, less = fn(named(model), 50 * x, y).grads, fn(named(model), 50 * x[1:], y[1:]).grads
    difference = sum((whole[k] - less[k]).square().sum() for k in whole).sqrt()
    assert 0 < difference <= fn.sensitivity * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "say"),
    [
        ({}, r"max_norm"),
        ({"max_norm": 1.0, "clip": "soft"}, r"(?s)soft.*flat"),
        ({"max_norm": float("inf")}, r"inf"),
        ({"max_norm": {"0": 1.0, "2": -1.0}}, r"(?s)2.*-1\.0"),
        ({"max_norm": {"0": 1.0}}, r"2\.weight|2\.bias"),
        ({"max_norm": {"0": 1.0, "*": 2.0}}, r"0\.weight|0\.bias"),
        ({"max_norm": {"0": 1.0, "2": 2.0, "3": 1.0}}, r"max_norm\['3'\] is a bound for no parameter"),
        ({"max_norm": 1.0, "clip": lambda norms: norms}, r"max_norm"),
        ({"clip": lambda norms: norms[:2]}, r"(?s)2.*6"),
    ],
    ids=[
        "none",
        "unknown",
        "infinite",
        "negative",
        "left_out",
        "twice",
        "of_nothing",
        "both",
        "wrong_length",
    ],
)
def test_what_does_not_fit(options, say):
    model, x, y, _ = problem()
    with pytest.raises(pexgrad.PexgradError, match=say):
        pexgrad.clipped_grad(model, **options)(named(model), x, y)


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 9])
@pytest.mark.parametrize("kept", [[0, 3, 4], []], ids=len)
def test_masks_on_half_precision_in_chunks(kept, chunk_size, dtype):
    model, x, y, _ = problem()
    model, x = model.to(dtype), x.to(dtype)
    mask = torch.zeros(6, dtype=torch.bool)
    mask[kept] = True
    x[~mask], y[~mask] = torch.nan, -5
    fn = pexgrad.clipped_grad(model, max_norm=0.5, chunk_size=chunk_size)
    out, alone = fn(named(model), x, y, mask=mask), fn(named(model), x[mask], y[mask])
    assert all(torch.equal(out.grads[k], alone.grads[k]) for k in out.grads)
    assert out.norms.dtype == torch.float32 and out.norms.shape == out.losses.shape == (6,)
    torch.testing.assert_close(out.norms[mask], alone.norms)
    assert not out.norms[~mask].any() and not out.losses[~mask].any()


@STRATEGIES
@pytest.mark.parametrize("kept", [[0, 3, 4], [], [0, 1, 2, 3, 4, 5]], ids=len)
def test_masked_examples_change_nothing(kept, strategy):
    model, x, y, _ = problem()
    mask = torch.zeros(6, dtype=torch.bool)
    mask[kept] = True
    fn = pexgrad.clipped_grad(model, max_norm=0.5, strategy=strategy)
    x[~mask] = torch.nan  # padding may hold anything
    out, alone = fn(named(model), x, y, mask=mask), fn(named(model), x[mask], y[mask])
    assert_rows_equal(out.grads, alone.grads)
    torch.testing.assert_close(out.norms[mask], alone.norms)
    torch.testing.assert_close(out.losses[mask], alone.losses)
    assert not out.norms[~mask].any() and not out.losses[~mask].any()


@pytest.mark.parametrize("mask", [torch.ones(5, dtype=torch.bool), torch.ones(6)], ids=["length", "dtype"])
def test_a_mask_that_does_not_fit(mask):
    model, x, y, _ = problem()
    with pytest.raises(pexgrad.PexgradError, match=r"(?s)mask.*6"):
        pexgrad.clipped_grad(model, max_norm=0.5)(named(model), x, y, mask=mask)


# --- noise ----------------------------------------------------------------------------------------


def test_noise_has_the_deviation_asked_for():
    grads = {"w": torch.full((300, 300), 2.0), "b": torch.zeros(50000)}
    noisy = pexgrad.add_noise(grads, 1.5, 0.4, torch.Generator().manual_seed(0))
    for name, g in grads.items():
        noise = (noisy[name] - g) / 0.6
        assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
        assert noise.dtype == g.dtype
    assert grads["w"].eq(2).all()  # the sum itself is left alone


def test_noise_of_a_seeded_generator_repeats_and_other_noise_does_not():
    grads = {"w": torch.zeros(5), "b": torch.zeros(5)}
    state = torch.get_rng_state()

    def seeded():
        return pexgrad.add_noise(grads, 1.0, 1.0, torch.Generator().manual_seed(3))

    assert torch.equal(seeded()["w"], seeded()["w"])
    assert not torch.equal(seeded()["w"], seeded()["b"])
    torch.manual_seed(0)
    first = pexgrad.add_noise(grads, 1.0, 1.0)
    torch.manual_seed(0)
    second = pexgrad.add_noise(grads, 1.0, 1.0)
    assert not torch.equal(first["w"], second["w"])  # entropy of the system, not of torch's generator
    torch.manual_seed(0)
    torch.set_rng_state(state)
    pexgrad.add_noise(grads, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_complex_sum_gets_the_deviation_in_both_parts():
    noise = pexgrad.add_noise({"w": torch.zeros(50000, dtype=torch.complex128)}, 1.5, 0.4)["w"] / 0.6
    assert abs(noise.real.std() - 1) < 0.02 and abs(noise.imag.std() - 1) < 0.02
    assert abs((noise.real * noise.imag).mean()) < 0.02


def test_noise_in_half_precision_is_rounded_once():
    grads = {"w": torch.full((50000,), 3.0, dtype=torch.bfloat16)}
    noisy = pexgrad.add_noise(grads, 1.0, 1.0, torch.Generator().manual_seed(0))["w"]
    wide = pexgrad.add_noise({"w": grads["w"].float()}, 1.0, 1.0, torch.Generator().manual_seed(0))["w"]
    assert noisy.dtype == torch.bfloat16 and torch.equal(noisy, wide.bfloat16())


def test_the_seed_is_not_all_the_entropy(monkeypatch):
    """A seed sets 32 bits of the CPU's generator: that is few enough to try them all."""
    state = torch.Generator().manual_seed(5 + (7 << 32)).get_state()
    assert (
        state[24:32].view(torch.int64).item() == 5
    )  # where the state is, and that the rest of the seed is lost
    monkeypatch.setattr(secrets, "randbits", lambda bits: 5)
    first, second = (pexgrad.add_noise({"w": torch.zeros(50000)}, 1.0, 1.0)["w"] for _ in range(2))
    assert abs((first * second).mean()) < 0.02
    assert abs(first.std() - 1) < 0.02 and abs(first.mean()) < 0.02


def test_no_noise():
    grads = {"w": torch.randn(5)}
    assert torch.equal(pexgrad.add_noise(grads, 0.0, 1.0)["w"], grads["w"])


@pytest.mark.parametrize(
    ("multiplier", "bound"), [(-1.0, 1.0), (1.0, -2.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_noise_that_makes_no_sense(multiplier, bound):
    with pytest.raises(pexgrad.PexgradError, match=r"noise_multiplier|max_norm"):
        pexgrad.add_noise({"w": torch.zeros(2)}, multiplier, bound)


def test_norms_of_half_precision_are_not_those_of_rounded_rows():
    """Rows that overflow in float16 have finite norms in float32."""
    model = torch.nn.Linear(8, 8, bias=False).half()
    x = torch.full((2, 64, 8), 30.0, dtype=torch.float16)
    fn = pexgrad.clipped_grad(model, lambda out, y: (out * 40).flatten(1).sum(1), max_norm=1.0, verify=False)
    out = fn(named(model), x)
    torch.testing.assert_close(
        out.norms, torch.full((2,), 64 * 30 * 40 * 8.0, dtype=torch.float32), rtol=1e-2, atol=0
    )
    assert out.grads["weight"].isfinite().all()
