"""The definition of a per-example gradient, computed the slow way.

Row b is the gradient of `loss(model(x_b), y_b).sum()`, with x_b and y_b example b kept as a batch of one.
Nothing here knows of pexgrad: only a loop and `torch.autograd.grad`.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch.utils._pytree import tree_leaves, tree_map


def call(model, x):
    """`x` is one tensor, a tuple of positional inputs, or a dict of keyword inputs."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def batch_size(x):
    return tensors(x)[0].shape[0]


def copied(tree):
    return tree_map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, tree)


def example(tree, b):
    """Example b as a batch of one, in memory of its own: a model may write into its input."""
    return tree_map(lambda t: t[b : b + 1].clone() if isinstance(t, torch.Tensor) else t, tree)


@contextlib.contextmanager
def restored(model):
    """Parameters and buffers that a forward writes to (running statistics, max_norm) are put back."""
    state = [*model.parameters(), *model.buffers()]
    before = [t.detach().clone() for t in state]
    yield
    for t, old in zip(state, before, strict=True):
        if not torch.equal(t.detach(), old):
            t.data.copy_(old)


def row(value, params, create_graph=False):
    """One row: the gradient of `value.sum()`, zeros where a parameter is not used."""
    value = value.sum()
    grads = [None] * len(params)
    if value.requires_grad:
        grads = torch.autograd.grad(
            value, list(params.values()), allow_unused=True, create_graph=create_graph, retain_graph=True
        )
    return [
        torch.zeros_like(p) if g is None else g.to_dense()
        for p, g in zip(params.values(), grads, strict=True)
    ]


def stacked(rows, params):
    if not rows:
        return {name: p.new_zeros((0, *p.shape)) for name, p in params.items()}
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


def live(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def rows_of(model, loss, x, y, create_graph=False):
    """{name: (B, *shape)} for every parameter of the module that requires a gradient."""
    params, rows = live(model), []
    for b in range(batch_size(x)):
        with restored(model):
            value = loss(call(model, example(x, b)), example(y, b))
            rows.append(row(value, params, create_graph))
    return stacked(rows, params)


def rows_of_function(f, params, loss, x, y):
    """The same for `f(params, *inputs)`: the gradient in every entry of `params`."""
    params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    rows = []
    for b in range(batch_size(x)):
        value = loss(call(lambda *a, **k: f(params, *a, **k), example(x, b)), example(y, b))
        rows.append(row(value, params))
    return stacked(rows, params)


def rows_of_one_forward(model, loss, x, y):
    """Rows of a model that draws random numbers: one ordinary forward, then a slice for each example."""
    params = live(model)
    output = call(model, copied(x))
    values = [loss(slice_of(output, b), example(y, b)) for b in range(batch_size(x))]
    return stacked([row(value, params) for value in values], params)


def slice_of(output, b):
    """Example b of an output, kept as a batch of one; the output may be of a class of the user's own."""
    if dataclasses.is_dataclass(output):
        return dataclasses.replace(output, **slice_of(vars(output), b))
    if isinstance(output, dict):
        return type(output)({name: slice_of(value, b) for name, value in output.items()})
    return tree_map(lambda t: t[b : b + 1] if isinstance(t, torch.Tensor) else t, output)


def losses_of(model, loss, x, y):
    values = []
    for b in range(batch_size(x)):
        with restored(model):  # with gradients on, for models that take derivatives
            values.append(loss(call(model, example(x, b)), example(y, b)).sum().detach())
    return torch.stack(values) if values else torch.zeros(0)


def norms_of(rows):
    return sum(r.detach().abs().unsqueeze(-1).flatten(1).square().sum(1) for r in rows.values()).sqrt()


def relative_error(got, want, floor=1e-300):
    """|got - want| / |want| in the Euclidean norm."""
    difference = (got.detach() - want.detach()).norm()
    return (difference / want.detach().norm().clamp(min=floor)).item()


def assert_rows_equal(got, want, tol=1e-9):
    """Same names in the same order, same shapes and dtypes, relative error below `tol` for every parameter.

    A gradient that is zero but for rounding (a bias before a normalisation) is held to 1e-4 of the whole row.
    """
    assert list(got) == list(want)
    floor = max(1e-4 * sum(w.detach().norm() ** 2 for w in want.values()) ** 0.5, 1e-12)
    for name, w in want.items():
        g = got[name]
        assert tuple(g.shape) == tuple(w.shape), f"{name}: shape {tuple(g.shape)}, expected {tuple(w.shape)}"
        assert g.dtype == w.dtype, f"{name}: {g.dtype}, expected {w.dtype}"
        error = relative_error(g, w, floor) if w.numel() else 0.0
        assert error < tol, f"{name}: relative error {error:.1e}"
