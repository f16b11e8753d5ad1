"""The table itself: its cases can fail, their examples are independent, and what is said to mix does."""

from __future__ import annotations

import pytest
import torch
from cases.case import TABLE
from models import NOT_YET, each, select
from oracle import (
    call,
    copied,
    example,
    live,
    losses_of,
    norms_of,
    relative_error,
    restored,
    rows_of,
    rows_of_one_forward,
    slice_of,
    tensors,
)
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.usefixtures("double")

# A batch that is not handled as a loop over it would be, by intent.
DEPENDS_ON_THE_BATCH_SIZE = {"branch_on_the_batch_size_that_matters", "scaled_by_the_batch_size"}


def outputs(model, x):
    with restored(model):  # with gradients on, for models that take derivatives
        return tree_map(detached, call(model, copied(x)))


def detached(leaf):
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def losses_of_the_batch(model, loss, x, y):
    """Losses of each example from one forward, where the loss gives them or can be given slices."""
    out = outputs(model, x)
    whole = loss(out, y)
    if whole.dim():
        return whole.flatten(1).sum(1) if whole.dim() > 1 else whole
    return torch.stack([loss(slice_of(out, b), example(y, b)) for b in range(tensors(x)[0].shape[0])])


@each(select())
def test_a_case_is_able_to_fail(case):
    model, x, y, loss = case.build()
    rows = rows_of(model, loss, x, y)
    assert rows.keys() == live(model).keys()
    assert all(r.isfinite().all() for r in rows.values())
    assert (norms_of(rows) > 0).all()
    assert (norms_of(rows).diff().abs() > 0).all(), "rows of different examples are alike"


@each(select())
def test_examples_are_independent(case):
    model, x, y, loss = case.build()
    one_by_one = losses_of(model, loss, x, y)
    if case.name in DEPENDS_ON_THE_BATCH_SIZE:
        return
    if any(t.dtype != torch.float64 for t in model.parameters()):
        torch.testing.assert_close(
            losses_of_the_batch(model, loss, x, y), one_by_one, rtol=1e-2, atol=1e-2, check_dtype=False
        )
    else:
        torch.testing.assert_close(losses_of_the_batch(model, loss, x, y), one_by_one, rtol=1e-12, atol=1e-12)


@each(select(without=()))
def test_parameters_do_not_depend_on_the_batch_size(case):
    two, five = case.build(2)[0], case.build(5)[0]
    assert all(torch.equal(p, q) for p, q in zip(two.parameters(), five.parameters(), strict=True))


@each(select("refused", "mixes", without=()))
def test_examples_that_are_said_to_mix_do(case):
    """The row that one batched forward gives an example is not the one it has alone."""
    model, x, y, loss = case.build()
    rows, batched = rows_of(model, loss, x, y), rows_of_one_forward(model, loss, x, y)
    assert any(relative_error(batched[name], rows[name], floor=1e-9) > 1e-3 for name in rows)


def test_every_entry_not_yet_answered_is_a_case_or_a_tag():
    assert set(NOT_YET) <= set(TABLE) | {tag for c in TABLE.values() for tag in c.tags}
