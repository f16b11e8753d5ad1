"""The table of what a call will do: every parameter, its operations, rules, bytes and flags."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from cases.case import Net, labels, wave
from models import each, pick
from oracle import live

import pexgrad
from pexgrad.factors import norm_cost

pytestmark = pytest.mark.usefixtures("double")


def explained(model, x, y=None, loss=torch.nn.functional.cross_entropy, **options):
    return pexgrad.per_example_grad(model, loss, **options).explain(dict(model.named_parameters()), x, y)


def text(*args, **kwargs):
    return repr(explained(*args, **kwargs))


def line_of(table, parameter):
    (line,) = [line for line in table.splitlines() if line.split()[:1] == [parameter]]
    return line


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Sequential(nn.ReLU(), nn.GroupNorm(1, 3)), nn.Flatten(), nn.Linear(27, 5)
    )


def test_operation_module_and_bytes_of_every_parameter():
    table = text(cnn(), torch.randn(4, 2, 5, 5), labels(4))
    assert "conv2d" in line_of(table, "0.weight") and "group_norm" in line_of(table, "1.1.bias")
    assert "linear" in line_of(table, "3.weight")
    assert " 1.1 " in line_of(table, "1.1.weight")  # the path of the module
    for name, numel in {"0.weight": 54, "0.bias": 3, "1.1.weight": 3, "3.weight": 135, "3.bias": 5}.items():
        assert f"{4 * 8 * numel:,}" in line_of(table, name)  # B rows of float64


def test_the_line_of_the_code():
    model = Net(lambda s, x: x @ s.w, w=nn.Parameter(torch.randn(4, 5)))
    assert "test_explain.py:" in line_of(text(model, torch.randn(3, 4), labels(3)), "w")


@pytest.mark.parametrize("rule", ["grouped", "unfold", "loop"])
def test_the_algorithm_of_a_convolution(rule):
    table = text(cnn(), torch.randn(4, 2, 5, 5), labels(4), conv_rule=rule)
    assert rule in line_of(table, "0.weight") and rule not in line_of(table, "3.weight")


def test_frozen_and_unused_parameters():
    model = Net(lambda s, x: s.a(x), a=nn.Linear(4, 5), b=nn.Linear(4, 5))
    model.a.bias.requires_grad_(False)
    table = text(model, torch.randn(3, 4), labels(3))
    assert "frozen" in line_of(table, "a.bias") and "frozen" not in line_of(table, "a.weight")
    assert "unused" in line_of(table, "b.weight")


def test_a_tied_parameter_has_a_line_for_each_use():
    model = Net(lambda s, i: s.emb(i) @ s.emb.weight.T, emb=nn.Embedding(7, 4))
    table = text(model, labels(3, 7)[:, None], None, wave)
    lines = [line for line in table.splitlines() if line.startswith("emb.weight")]
    assert len(lines) == 2 and all("tied" in line for line in lines)
    assert "embedding" in "".join(lines)


def test_how_norms_are_computed(monkeypatch):
    def norms(model, x):
        table = pexgrad.per_example_grad_norm(model, wave).explain(dict(model.named_parameters()), x)
        return [line.norms for line in table.lines if "weight" in line.parameter]

    assert norms(nn.Linear(40, 50), torch.randn(3, 40)) == ["product of norms"]
    assert norms(nn.Linear(40, 50), torch.randn(3, 5, 40)) == ["gram"]
    assert norms(nn.Linear(40, 50), torch.randn(3, 200, 40)) == ["rows in pieces"]
    monkeypatch.setattr(norm_cost, "SMALL", 9 * 40 * 50)
    assert norms(nn.Linear(40, 50), torch.randn(9, 5, 40)) == ["rows in pieces"]
    assert norms(nn.Linear(40, 50), torch.randn(10, 5, 40)) == ["gram"]
    assert norms(nn.Linear(40, 50), torch.randn(3, 40)) == ["product of norms"]
    derived = nn.utils.parametrizations.weight_norm(nn.Linear(40, 50))
    assert set(norms(derived, torch.randn(3, 40))) == {
        "rows in pieces",
        "product of norms",
        "products of norms",
    }
    masked = nn.utils.prune.random_unstructured(nn.Linear(40, 50), "weight", 0.5)
    assert norms(masked, torch.randn(3, 40)) == ["product of norms"]
    assert norms(masked, torch.randn(3, 5, 40)) == ["rows in pieces"]
    both = Net(lambda s, i: s.emb(i) @ s.emb.weight.T, emb=nn.Embedding(30, 20))
    assert norms(both, labels(3, 7)[:, None]) == ["sums over equal ids", "product of norms"]
    overlapping = Net(lambda s, i: s.emb(i) @ s.emb.weight[:9].T, emb=nn.Embedding(30, 20))
    assert norms(overlapping, labels(3, 7)[:, None]) == ["rows in pieces"] * 2


def test_the_fallback_is_flagged():
    model = Net(lambda s, x: torch.cdist(x, s.centres, p=1), centres=nn.Parameter(torch.randn(5, 4)))
    assert "fallback" in line_of(text(model, torch.randn(3, 4), labels(3)), "centres")
    assert "fallback" not in text(cnn(), torch.randn(3, 2, 5, 5), labels(3))


@pytest.mark.parametrize("strategy", ["naive", "multi"])
def test_other_strategies(strategy):
    table = text(cnn(), torch.randn(4, 2, 5, 5), labels(4), strategy=strategy)
    assert strategy in line_of(table, "0.weight")


def test_an_empty_batch_is_explained():
    assert line_of(text(nn.Linear(4, 5), torch.randn(0, 4), labels(0)), "weight")


def test_a_refusal_is_one_here_as_well():
    with pytest.raises(pexgrad.PexgradError, match=r"(?i)batch.?norm"):
        text(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5)), torch.randn(3, 4), labels(3))


def test_explaining_does_not_trace_again():
    model, x, y = cnn(), torch.randn(4, 2, 5, 5), labels(4)
    fn = pexgrad.per_example_grad(model)
    fn(dict(model.named_parameters()), x, y)
    fn.explain(dict(model.named_parameters()), x, y)
    assert fn.trace_count == 1


KINDS = pick("""
    mlp conv3d_every_argument group_norm embedding_with_padding tied_embedding_and_head weight_norm sliced_weights
    class_token_and_positions columns_written lstm_cell_in_a_loop mixture_density
""")


@each(KINDS)
def test_every_parameter_is_in_the_table(case):
    model, x, y, loss = case.build()
    lines = text(model, x, y, loss).splitlines()
    for name in live(model):
        assert any(line.split()[:1] == [name] for line in lines), name


FAST = pick("""
    mlp linear_with_three_leading_dimensions conv1d conv2d_every_argument conv3d layer_norm group_norm embedding
""")


@each(FAST)
def test_layers_with_a_rule_do_not_take_the_fallback(case):
    model, x, y, loss = case.build()
    assert "fallback" not in text(model, x, y, loss)


def test_explain_draws_no_random_numbers():
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), torch.randn(3, 4), torch.tensor([0, 2, 1])
    fn = pexgrad.per_example_grad(model)
    before = torch.get_rng_state()
    for _ in range(2):
        fn.explain(dict(model.named_parameters()), x, y)
    assert torch.equal(torch.get_rng_state(), before)
