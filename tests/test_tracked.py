"""What a graph alone tells of the places of its examples, and what it does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_mixing import MODELS
from test_mixing import params as params_of_mixing

from pexgrad.base.fakes import HINT
from pexgrad.base.nodes import returned
from pexgrad.inputs.arguments import check_call
from pexgrad.inputs.rebind import Bound
from pexgrad.stages.layout import Layout
from pexgrad.stages.tracked import tracked
from pexgrad.tracing.trace import trace

B, T = 6, 3


def place_of(model, params, *x):
    """Where the graph tells that the examples of the output are; None where it does not."""
    bound = Bound(model)
    traced = trace(bound, check_call(bound, params, x, None), HINT)
    (output,) = returned(traced.graph)
    return tracked(traced.graph, traced.inputs, traced.batch, drawing=True).get(output)


def params():
    return {"w": torch.randn(4, 5), "table": torch.randn(64, 4), "e": torch.randn(1, 1, 4)}


def inputs():
    return torch.randn(B, T, 4), torch.randint(T, (B,))


def filled(x, n):
    out = x.new_zeros(len(x), T, 5)
    out[:, 1:] = n
    return out


def in_heads(p, x, i):
    """As `nn.MultiheadAttention` does: the batch and the heads in one dimension, then time and the batch."""
    q = (x.transpose(0, 1) @ p["w"][:, :4]).reshape(T, len(x) * 2, 2).transpose(0, 1)
    out = F.scaled_dot_product_attention(q, q, q)
    return out.transpose(0, 1).reshape(T * len(x), 4) @ p["w"]


def places_twice(x):
    i = torch.arange(len(x))
    return x[i, i]


def places_in_a_fold(x):
    return x.flatten(0, 1)[torch.arange(len(x))[:, None].expand(len(x), T).reshape(-1)]


def normed(x):
    return F.layer_norm(F.group_norm(x.transpose(1, 2), 2), (T,))


TOLD = {
    "a_dimension_of_its_own": (lambda p, x, i: x @ p["w"], Layout()),
    "folded_outside": (lambda p, x, i: x.flatten(0, 1) @ p["w"], Layout(0, 1, T)),
    "folded_inside": (lambda p, x, i: x.transpose(0, 1).flatten(0, 1) @ p["w"], Layout(0, T, 1)),
    "folded_between": (lambda p, x, i: x.permute(1, 0, 2).reshape(-1, 1) * p["w"][0], Layout(0, T, 4)),
    "unfolded_again": (
        lambda p, x, i: (x.transpose(0, 1).flatten(0, 1) @ p["w"]).view(T, len(x), 5),
        Layout(1),
    ),
    "last": (lambda p, x, i: (x[:, 0] @ p["w"]).T, Layout(1)),
    "heads": (in_heads, Layout(0, T, 1)),
    "token_of_a_class": (lambda p, x, i: torch.cat([p["e"].expand(len(x), 1, 4), x], 1) @ p["w"], Layout()),
    "token_repeated": (lambda p, x, i: torch.cat([p["e"].repeat(len(x), 1, 1), x], 1) @ p["w"], Layout()),
    "each_repeated": (lambda p, x, i: x.repeat_interleave(2, 0) @ p["w"], Layout(0, 1, 2)),
    "picked_at_its_own_place": (lambda p, x, i: x[torch.arange(len(x)), i] @ p["w"], Layout()),
    "picked_at_its_own_place_by_masks": (
        lambda p, x, i: x[torch.arange(len(x))[:, None], torch.arange(2)[None]] @ p["w"],
        Layout(),
    ),
    "picked_in_a_table": (lambda p, x, i: p["table"][i] @ p["w"], Layout()),
    "looked_up": (lambda p, x, i: F.embedding(i, p["table"]) @ p["w"], Layout()),
    "gathered": (lambda p, x, i: x.gather(1, i[:, None, None].expand(-1, 1, 4)) @ p["w"], Layout()),
    "dropped": (lambda p, x, i: F.dropout(x @ p["w"], 0.5), Layout()),
    "convolved": (
        lambda p, x, i: F.conv1d(x.transpose(1, 2), p["w"].T[:, :, None].expand(-1, -1, 2)),
        Layout(),
    ),
    "normalised": (lambda p, x, i: normed(x) * p["w"][0, 0], Layout()),
    "multiplied": (lambda p, x, i: x @ x.transpose(1, 2) * p["w"][0, 0], Layout()),
    "summed": (lambda p, x, i: torch.einsum("bti,io->tbo", x, p["w"]), Layout(1)),
    "added_to_a_product": (lambda p, x, i: torch.addmm(x[:, 1], x[:, 0], p["w"][:, :4]), Layout()),
    "filled": (lambda p, x, i: filled(x, 1) + p["w"][0], Layout()),
    "written_in_place": (lambda p, x, i: (x @ p["w"]).relu_().mul_(2), Layout()),
}

NOT_TOLD = {
    "shuffled": lambda p, x, i: x[i] @ p["w"],
    "turned": lambda p, x, i: x.flip(0) @ p["w"],
    "at_the_place_of_another": lambda p, x, i: x[torch.arange(len(x)).flip(0)] @ p["w"],
    "at_places_from_the_second_on": lambda p, x, i: x[(torch.arange(len(x)) + 1) % len(x)] @ p["w"],
    "place_as_a_number": lambda p, x, i: x @ p["w"] * torch.arange(len(x))[:, None, None],
    "place_picked_as_a_number": lambda p, x, i: x @ p["w"] * torch.arange(len(x))[:, None][:, [0], None],
    "row_of_a_table_at_its_place": lambda p, x, i: p["table"][torch.arange(len(x))] @ p["w"],
    "at_its_place_along_others": lambda p, x, i: x[torch.arange(len(x)), torch.arange(len(x))] @ p["w"],
    "at_its_place_twice": lambda p, x, i: places_twice(x.repeat(1, 8, 1)) @ p["w"],
    "at_its_place_in_a_fold": lambda p, x, i: places_in_a_fold(x) @ p["w"],
    "without_numbers": lambda p, x, i: x[:, :0].transpose(0, 1).reshape(len(x), 0) @ p["w"][:0],
    "rows_of_a_table": lambda p, x, i: p["table"][: len(x)] @ p["w"],
    "gathered_in_a_table": lambda p, x, i: p["table"].gather(1, i[:, None]) * p["w"][0],
    "scattered_from_a_table": lambda p, x, i: x[:, 0].scatter(1, i[:, None], p["table"]) @ p["w"],
    "divided_by_the_size": lambda p, x, i: x @ p["w"] / len(x),
    "filled_with_the_size": lambda p, x, i: x @ p["w"] + torch.full((len(x), 1, 1), len(x)),
    "written_with_the_size": lambda p, x, i: filled(x, len(x)) + p["w"][0],
    "columns_by_the_size": lambda p, x, i: x @ p["w"] + p["table"].flatten()[len(x) : len(x) + 5],
    "normalised_over_the_batch": lambda p, x, i: F.batch_norm(x[:, 0] @ p["w"], None, None, training=True),
    "refolded": lambda p, x, i: x[:, 0].T.reshape(-1, 4) @ p["w"],
    "repeated_inside_out": lambda p, x, i: x.flatten(0, 1) @ p["w"] + x.transpose(0, 1).flatten(0, 1) @ p["w"],
    "copies_inside_out": lambda p, x, i: x.flatten(0, 1) @ p["w"] + p["table"][:T, :1].repeat_interleave(len(x), 0),
    "convolved_along_the_batch": lambda p, x, i: F.conv1d((x[:, 0] @ p["w"]).T, p["w"].new_ones(5, 5, 1)).T,
    "summed_over_the_batch": lambda p, x, i: torch.einsum("bti,bti->t", x, x) + x @ p["w"].sum(1),
    "written_elsewhere": lambda p, x, i: x @ p["w"] + p["w"].new_zeros(4).copy_(x.sum((0, 1))).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_places_that_are_told(name):
    model, want = TOLD[name]
    assert place_of(model, params(), *inputs()) == want


@pytest.mark.parametrize("name", [n for n in TOLD if n != "dropped"])
def test_examples_stay_at_the_places_that_are_told(name):
    """Those of others, and how many there are, change nothing."""
    model, at = TOLD[name]
    p, (x, i) = params(), inputs()
    for b in (0, 2):
        out = at.view(model(p, x, i), B)[b]
        others = x.roll(1, 0).neg().index_copy(0, torch.tensor([b]), x[b : b + 1])[: b + 2]
        ids = i.flip(0).index_copy(0, torch.tensor([b]), i[b : b + 1])[: b + 2]
        again = at.view(model(p, others, ids), b + 2)[b]
        torch.testing.assert_close(again, out)


@pytest.mark.parametrize("name", NOT_TOLD)
def test_places_that_are_not_told(name):
    assert place_of(NOT_TOLD[name], params(), *inputs()) is None


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_told_of_what_mixes(name):
    assert place_of(MODELS[name], params_of_mixing(), torch.randn(B, 3)) is None


def test_nothing_is_told_of_an_operation_that_only_has_the_name_of_one():
    @torch.library.custom_op("pexgrad_tests::relu", mutates_args=())
    def relu(v: torch.Tensor) -> torch.Tensor:
        return v - v.mean(0)

    relu.register_fake(torch.empty_like)
    assert place_of(lambda p, x, i: relu(x @ p["w"]), params(), *inputs()) is None
