"""The library makes every tensor of its own beside the ones it was given, whatever the default device is.

The default here is "meta", whose tensors have no values and mix with no others. People set it to "cuda" and keep their
data, a generator or a model on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from cases.case import TABLE
from models import each, pick
from oracle import assert_rows_equal, norms_of, relative_error, rows_of

import pexgrad
from pexgrad.extend import check_rule
from pexgrad.testing import check_per_example_grad

pytestmark = pytest.mark.usefixtures("double")

DETERMINISTIC = pick(
    "mlp cnn_of_the_paper conv2d_depthwise conv_transpose2d embedding bag_sum table_by_gather lstm mha layer_norm "
    "group_norm bilinear einsum_with_a_parameter linear_with_a_frozen_weight rnn_cell_in_a_loop"
)


@pytest.fixture
def elsewhere():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def on_cpu(tree):
    return all(t.device.type == "cpu" for t in torch.utils._pytree.tree_leaves(tree) if torch.is_tensor(t))


class Here(torch.nn.Module):
    """A model whose forward says where tensors are made."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        with torch.device("cpu"):
            return self.model(*inputs)


@pytest.mark.parametrize("batch", [1, 3])
@each(pick("mlp embedding lstm mha"))
def test_other_strategies_and_graphs(case, batch, elsewhere):
    with torch.device("cpu"):
        model, x, y, loss = case.build(batch)
        want = rows_of(model, loss, x, y)
    params = dict(model.named_parameters())
    for strategy in ("multi", "naive"):
        assert_rows_equal(pexgrad.per_example_grad(model, loss, strategy=strategy)(params, x, y), want)
    fn = pexgrad.per_example_grad(model, loss)
    assert_rows_equal(fn.lower(params, x, y)(params, x, y), want)
    assert_rows_equal(pexgrad.chunked(fn, 2)(params, x, y), want)


@each(DETERMINISTIC)
def test_every_transform(case, elsewhere):
    with torch.device("cpu"):
        model, x, y, loss = case.build(3)
        want = rows_of(model, loss, x, y)
    params, norms = dict(model.named_parameters()), norms_of(want)
    fn = pexgrad.per_example_grad(model, loss)
    assert_rows_equal(fn(params, x, y), want)
    assert relative_error(pexgrad.per_example_grad_norm(model, loss)(params, x, y), norms) < 1e-9
    clipped = pexgrad.clipped_grad(model, loss, max_norm=0.5)(params, x, y)
    weights = 0.5 / norms.clamp(min=0.5)
    assert_rows_equal(clipped.grads, {k: torch.tensordot(weights, w, 1) for k, w in want.items()})
    assert on_cpu(pexgrad.add_noise(clipped.grads, 1.0, 0.5))
    fn.explain(params, x, y)


@each(pick("mlp cnn_of_the_paper embedding lstm"))
def test_jacobians_and_measures(case, elsewhere):
    with torch.device("cpu"):
        model, x, y, loss = case.build(4)
        flat = torch.cat([w.flatten(1) for w in rows_of(model, loss, x, y).values()], 1)
    params = dict(model.named_parameters())
    jacobian_of = pexgrad.per_example_jacobian(model, loss)
    jacobian = jacobian_of(params, x, y)
    assert relative_error(jacobian.gram(), flat @ flat.T) < 1e-9
    assert relative_error(jacobian @ {k: torch.ones_like(p) for k, p in params.items()}, flat.sum(1)) < 1e-9
    batches = [(x, y), (x, y)]
    assert pexgrad.noise_scale(*pexgrad.dataset_moments(jacobian_of, params, batches)).scale > 0
    assert on_cpu(pexgrad.fisher_diagonal(jacobian_of, params, batches))
    assert on_cpu(pexgrad.project(jacobian, 3))
    assert on_cpu(pexgrad.importance_sample(jacobian.norms(), 2))


@pytest.mark.parametrize("name", sorted(c.name for c in TABLE.values() if "random" in c.tags))
def test_random_operations(name, elsewhere):
    """Verified against a loop in which they stand still, on the device that the model names."""
    with torch.device("cpu"):
        model, x, y, loss = TABLE[name].build(3)
    fn = pexgrad.per_example_grad(Here(model), loss)
    assert on_cpu(fn({f"model.{k}": p for k, p in model.named_parameters()}, x, y))


def test_the_checks_of_the_library_itself(elsewhere):
    with torch.device("cpu"):
        model, x, y, loss = TABLE["mlp"].build(3)
        w = torch.randn(4, 3)
        xs = torch.randn(5, 2, 3)
    check_per_example_grad(model, x, y, loss=loss)
    check_rule(lambda p, x: torch.nn.functional.linear(x, p["w"]), {"w": w}, xs)
