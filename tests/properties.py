"""What is true of the rows of every layer, written once and asserted of each family."""

from __future__ import annotations

import torch
from oracle import assert_rows_equal, rows_of

import pexgrad


def against(out, cotangent):
    """The loss whose cotangent is given: with it, rows are the rule alone."""
    return (out * cotangent).flatten(1).sum(1)


def rows(layer, x, cotangent, **options):
    return pexgrad.per_example_grad(layer, against, **options)(dict(layer.named_parameters()), x, cotangent)


def cotangent_of(layer, x):
    torch.manual_seed(1)
    return torch.randn_like(layer(x))


def check_against_the_loop(layer, x, **options):
    c = cotangent_of(layer, x)
    assert_rows_equal(rows(layer, x, c, **options), rows_of(layer, against, x, c))


def check_row_is_of_its_example_alone(layer, x):
    """Every other example may change at will."""
    c, fn = cotangent_of(layer, x), pexgrad.per_example_grad(layer, against)
    before = fn(dict(layer.named_parameters()), x, c)
    b = len(x) // 2
    keep = (torch.arange(len(x)) == b).view(-1, *[1] * (x.dim() - 1))
    after = fn(dict(layer.named_parameters()), torch.where(keep, x, x.flip(-1) * 3), torch.where(keep, c, -c))
    assert_rows_equal({k: r[b] for k, r in after.items()}, {k: r[b] for k, r in before.items()})


def check_rows_sum_to_the_ordinary_gradient(layer, x):
    c = cotangent_of(layer, x)
    total = torch.autograd.grad(against(layer(x), c).sum(), list(layer.parameters()))
    got = {k: r.sum(0) for k, r in rows(layer, x, c).items()}
    assert_rows_equal(got, dict(zip(got, total, strict=True)))


def check_permuting_the_batch_permutes_the_rows(layer, x):
    c, order = cotangent_of(layer, x), torch.randperm(len(x))
    fn = pexgrad.per_example_grad(layer, against)
    params = dict(layer.named_parameters())
    want = {k: r[order] for k, r in fn(params, x, c).items()}
    assert_rows_equal(fn(params, x[order], c[order]), want)


def check_linear_in_the_cotangent(layer, x):
    a, b = cotangent_of(layer, x), torch.randn_like(layer(x))
    fn, params = pexgrad.per_example_grad(layer, against), dict(layer.named_parameters())
    ra, rb = fn(params, x, a), fn(params, x, b)
    assert_rows_equal(fn(params, x, 2 * a - 3 * b), {k: 2 * ra[k] - 3 * rb[k] for k in ra})


def check_strategies_agree(layer, x):
    c = cotangent_of(layer, x)
    want = rows(layer, x, c, strategy="naive")
    assert_rows_equal(rows(layer, x, c, strategy="multi"), want)
    assert_rows_equal(rows(layer, x, c, strategy="crb"), want)


def check_agrees_with_vmap(layer, x):
    def loss(params, x, c):
        return against(torch.func.functional_call(layer, params, (x[None],)), c[None]).sum()

    c, params = cotangent_of(layer, x), {k: p.detach() for k, p in layer.named_parameters()}
    want = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, c)
    assert_rows_equal(rows(layer, x, c), {k: want[k] for k in params})
