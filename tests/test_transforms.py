"""The transforms over the whole table: rows are the definition's, and a call changes nothing."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
import torch.nn as nn
from answers import answer, or_refused
from models import each, pick, select
from oracle import assert_rows_equal, copied, live, losses_of, norms_of, rows_of, rows_of_one_forward, tensors
from purity import assert_no_fakes, assert_unchanged, snapshot

import pexgrad
from pexgrad.base.still import StandStill
from pexgrad.stages.few_examples import REPEATED, draw
from pexgrad.stages.probe import probe
from pexgrad.stages.trial import Trial

pytestmark = pytest.mark.usefixtures("double")

STRATEGIES = ("crb", "multi", "naive")

# A few of each kind, for the options that do not depend on the model.
FEW = pick("""
    mlp cnn_of_the_paper conv2d_every_argument layer_norm embedding tied_embedding_and_head weight_norm
    time_inside_the_batch relu_and_residual_in_place keyword_inputs_and_dict_output frozen_backbone
    losses_over_tokens class_token_and_positions
""")


def named(model):
    return dict(model.named_parameters())


# --- rows -----------------------------------------------------------------------------------------


@each(select())
def test_rows_are_those_of_the_loop(case):
    a = answer(case)
    assert_rows_equal(a.rows, a.want, case.tol)


@each(select())
def test_losses_are_those_of_the_loop(case):
    a = answer(case)
    want = losses_of(a.model, a.loss, a.x, a.y)
    torch.testing.assert_close(a.losses, want, rtol=case.tol, atol=case.tol, check_dtype=False)
    assert not a.losses.requires_grad


@each(select())
def test_the_examples_are_where_the_probe_finds_them(case):
    """Also where the graph has told it, and no probe has run."""
    a = answer(case)
    call = a.fn._check(a.params, copied(a.x), copied(a.y))
    for pipeline in a.fn._traces:
        few, sites = draw(pipeline.trace.serves, call, REPEATED), [s.site for s in pipeline.sites]
        if few.batch > 1:
            with StandStill():
                found, _ = probe(Trial(pipeline.trace, pipeline.program, few), sites)
            told = [at for s in pipeline.sites for at in s.layouts]
            assert found.outputs == pipeline.losses.outputs.layouts
            assert [*map(astuple, found.edges)] == [*map(astuple, told)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@each(FEW)
def test_rows_without_losses(case, strategy):
    model, x, y, loss = case.build()
    rows = pexgrad.per_example_grad(model, loss, strategy=strategy)(named(model), x, y)
    assert_rows_equal(rows, rows_of(model, loss, x, y), case.tol)


@pytest.mark.parametrize("strategy", ["naive", "multi"])
@each(select())
def test_other_strategies_take_any_model(case, strategy):
    model, x, y, loss = case.build()
    fn = pexgrad.per_example_grad(model, loss, strategy=strategy)
    want, given = rows_of(model, loss, x, y), (copied(x), copied(y))
    before = snapshot(model, *given)
    got = or_refused(case, lambda: fn(named(model), *given), "loop_may_refuse")
    assert_rows_equal(got, want, case.tol)
    assert_unchanged(before, snapshot(model, *given))


@each(select())
def test_one_trace_serves_every_batch_size(case):
    a = answer(case)
    sizes = {d for t in tensors(a.x) for d in t.shape[1:] if 2 < d < 9 and d != case.batch}
    for b in (0, 1, 2, *sorted(sizes)[:1]):
        _, x, y, _ = case.build(b)
        want = rows_of(a.model, a.loss, x, y)
        _, got = or_refused(case, lambda x=x, y=y: a.fn(a.params, copied(x), copied(y)))
        assert_rows_equal(got, want, case.tol)
    if "retraces" not in case.tags:
        assert a.fn.trace_count == 1


@each(select())
def test_a_call_changes_nothing(case):
    a = answer(case)
    assert_unchanged(a.before, a.after)
    assert_no_fakes(a.model)


@each(select())
def test_results_lie_in_memory_of_their_own(case):
    """So that changing one in place changes no other, nor an input or a parameter."""
    a = answer(case)
    given = {t.untyped_storage().data_ptr() for t in (*tensors((a.x, a.y)), *a.model.parameters())}
    results = [t for t in (a.losses, *a.rows.values()) if t.numel()]
    lie = [t.untyped_storage().data_ptr() for t in results]
    assert len(set(lie)) == len(lie) and given.isdisjoint(lie)
    for t in results:
        t.detach().mul_(1)  # which torch refuses where elements overlap


@each(select())
def test_a_second_call_gives_the_same_bits(case):
    a = answer(case)
    losses, again = a.fn(a.params, copied(a.x), copied(a.y))
    assert torch.equal(losses, a.losses)
    for name, rows in a.rows.items():
        assert torch.equal(again[name], rows), name


@each(select())
def test_values_passed_in_are_what_counts(case):
    """Detached copies with other values, while the module keeps its own."""
    a = answer(case)
    other, x, y, loss = case.build()
    for p in other.parameters():
        p.data.mul_(0.9).add_(0.01)
    passed = {name: p.detach().clone() for name, p in other.named_parameters()}
    _, got = or_refused(case, lambda: a.fn(passed, copied(x), copied(y)))
    assert_rows_equal(got, rows_of(other, loss, x, y), case.tol)


# --- random numbers -------------------------------------------------------------------------------


@each(select("random", without=("refused",)))
def test_random_numbers_are_those_of_one_ordinary_forward(case):
    model, x, y, loss = case.build()
    fn = pexgrad.per_example_grad(model, loss)
    for seed in (0, 7):  # the first call traces, the second does not
        torch.manual_seed(seed)
        want, state = rows_of_one_forward(model, loss, x, y), torch.get_rng_state()
        torch.manual_seed(seed)
        assert_rows_equal(fn(named(model), x, y), want)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("strategy", ["naive", "multi"])
@each(select("random", without=("refused",)))
def test_other_strategies_draw_anew_for_each_example(case, strategy):
    model, x, y, loss = case.build(1)
    fn = pexgrad.per_example_grad(model, loss, strategy=strategy)
    torch.manual_seed(3)
    want = rows_of(model, loss, x, y)
    torch.manual_seed(3)
    assert_rows_equal(fn(named(model), x, y), want)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chunk_size", [1, 2, 100])
@each(FEW)
def test_chunks_give_the_same_answer(case, chunk_size, strategy):
    model, x, y, loss = case.build(5)
    fn = pexgrad.per_example_grad(model, loss, chunk_size=chunk_size, strategy=strategy)
    assert_rows_equal(fn(named(model), x, y), rows_of(model, loss, x, y), case.tol)


@each(FEW)
def test_chunks_of_losses_and_clipped_sums(case):
    model, x, y, loss = case.build(5)
    rows = rows_of(model, loss, x, y)
    losses, got = pexgrad.per_example_value_and_grad(model, loss, chunk_size=2)(named(model), x, y)
    assert_rows_equal(got, rows, case.tol)
    torch.testing.assert_close(losses, losses_of(model, loss, x, y))
    out = pexgrad.clipped_grad(model, loss, max_norm=1e6, chunk_size=2)(named(model), x, y)
    assert_rows_equal(out.grads, {k: r.sum(0) for k, r in rows.items()}, case.tol)
    torch.testing.assert_close(out.norms, norms_of(rows))


# without weight norm, whose fused kernel in torch takes |v| for a constant in its second derivative: see
# test_double_backward.py
SMOOTH = pick("""
    mlp_with_a_loss_of_its_own conv2d_every_argument layer_norm class_token_and_positions embedding
    layer_called_twice time_inside_the_batch windows gru_cell_in_a_loop
    targets_in_a_structure
""")


@pytest.mark.parametrize("strategy", STRATEGIES)
@each(SMOOTH)
def test_rows_can_be_differentiated(case, strategy):
    """The gradient of a function of the rows, in the parameters and in the input."""
    model, x, y, loss = case.build()
    x = x.requires_grad_() if x.is_floating_point() else x
    wrt = [*live(model).values(), *([x] if x.requires_grad else [])]

    def gradient(rows):
        value = sum((r * torch.linspace(0.5, 1.5, r.numel()).view_as(r)).sin().sum() for r in rows.values())
        return torch.autograd.grad(value, wrt, allow_unused=True, materialize_grads=True)

    fn = pexgrad.per_example_grad(model, loss, strategy=strategy, create_graph=True)
    got = gradient(fn(named(model), x, y))
    want = gradient(rows_of(model, loss, x, y, create_graph=True))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11)


@each(FEW)
def test_rows_are_not_attached_to_anything(case):
    a = answer(case)
    assert not any(r.requires_grad for r in a.rows.values())


@each(FEW)
def test_without_verification(case):
    model, x, y, loss = case.build()
    fn = pexgrad.per_example_grad(model, loss, verify=False)
    assert_rows_equal(fn(named(model), x, y), rows_of(model, loss, x, y), case.tol)


@each(FEW)
def test_inside_no_grad(case):
    model, x, y, loss = case.build()
    want = rows_of(model, loss, x, y)
    with torch.no_grad():
        got = pexgrad.per_example_grad(model, loss)(named(model), x, y)
        assert not torch.is_grad_enabled()
    assert_rows_equal(got, want, case.tol)


# --- refusals -------------------------------------------------------------------------------------


@each(select("refused", without=()))
def test_refused(case):
    model, x, y, loss = case.build()
    before = snapshot(model)
    with pytest.raises(pexgrad.PexgradError, match=case.match):
        pexgrad.per_example_grad(model, loss)(named(model), x, y)
    assert_unchanged(before, snapshot(model))
    assert_no_fakes(model)


@pytest.mark.parametrize("transform", ["per_example_value_and_grad", "clipped_grad"])
@each(
    [
        c
        for c in select("refused", without=())
        if c.name in ("batch_norm_in_train", "next_example_added", "branch_on_data")
    ]
)
def test_refused_by_every_transform(case, transform):
    model, x, y, loss = case.build()
    options = {"max_norm": 1.0} if transform == "clipped_grad" else {}
    with pytest.raises(pexgrad.PexgradError, match=case.match):
        getattr(pexgrad, transform)(model, loss, **options)(named(model), x, y)


@pytest.mark.parametrize("strategy", ["naive", "multi"])
@each(select("refused", "naive", without=()))
def test_refused_by_the_graph_but_taken_by_the_loop(case, strategy):
    model, x, y, loss = case.build()
    got = pexgrad.per_example_grad(model, loss, strategy=strategy)(named(model), x, y)
    assert_rows_equal(got, rows_of(model, loss, x, y))


def test_what_a_transform_and_its_operator_print():
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    fn = pexgrad.per_example_jacobian(model, nn.CrossEntropyLoss())
    assert repr(fn) == "PerExampleJacobian(Linear, loss=CrossEntropyLoss)"
    assert (
        repr(pexgrad.clipped_grad(lambda p, x: x @ p["w"], max_norm=1))
        == "ClippedGrad(<lambda>, loss=cross_entropy)"
    )
    jacobian = fn(dict(model.named_parameters()), x, y)
    assert repr(jacobian) == "Jacobian(5 examples, 2 parameters)" and repr(jacobian.T) == f"{jacobian}.T"
