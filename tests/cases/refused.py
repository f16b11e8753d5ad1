"""What has no per-example gradient, or none that a graph can give: refused, with reason and remedy."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cases.case import Net, case, labels, param, wave

MIXES = r"(?is)(mix|depend|told apart)"
NAIVE = r"(?is)naive"


def lin(forward, b, **members):
    return Net(forward, lin=nn.Linear(4, 5), **members), torch.randn(b, 4), None, wave


def mixes(make):
    return case("refused", "mixes", match=MIXES)(make)


def no_graph(make):
    """No graph can be made, but the loop over examples is well defined: the message must name it."""
    return case("refused", "naive", match=NAIVE)(make)


@case("refused", "mixes", match=r"(?is)batch.?norm.*(GroupNorm|InstanceNorm|eval\(\))")
def batch_norm_in_train(b):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
    return net, torch.randn(b, 3, 6, 6), labels(b), F.cross_entropy


@case("refused", "mixes", match=r"(?is)batch.?norm.*(GroupNorm|InstanceNorm|eval\(\))")
def batch_norm_1d_in_train_deep_inside(b):
    body = nn.ModuleDict({"inner": nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4))})
    return Net(lambda s, x: s.body["inner"](x), body=body), torch.randn(b, 3, 5), None, wave


@case("refused", "mixes", match=r"(?is)batch.?norm.*(GroupNorm|InstanceNorm|track_running_stats)")
def batch_norm_without_statistics_in_eval(b):
    net = nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    return net, torch.randn(b, 3, 5), None, wave


@mixes
def mean_over_the_batch_subtracted(b):
    return lin(lambda s, x: s.lin(x - x.mean(0)), b)


@mixes
def mean_over_the_batch_of_features(b):
    return lin(lambda s, x: (h := s.lin(x)) - h.mean(0, keepdim=True), b)


@mixes
def deviation_over_the_batch(b):
    return lin(
        lambda s, x: torch.cat([h := s.lin(x), h.std(0, unbiased=False).mean().expand(x.shape[0], 1)], 1), b
    )


@mixes
def attention_over_the_batch(b):
    return lin(lambda s, x: (h := s.lin(x)) + torch.softmax(h @ h.t(), -1) @ h, b)


@mixes
def attention_layer_with_the_batch_taken_for_time(b):
    """The default layout of `nn.MultiheadAttention` is (T, B, C): given (B, T, C), it mixes examples."""
    net = Net(lambda s, x: s.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(4, 2))
    return net, torch.randn(b, 5, 4), None, wave


@case("refused", "mixes", match=r"(?is)(mix|depend|told apart|batch size|plain number)")
def recurrence_over_the_batch(b):
    return Net(lambda s, x: s.rnn(x)[0], rnn=nn.GRU(4, 3)), torch.randn(b, 5, 4), None, wave


@mixes
def sorted_over_the_batch(b):
    return lin(lambda s, x: s.lin(x).sort(0).values, b)


@mixes
def softmax_over_the_batch(b):
    return lin(lambda s, x: s.lin(x).softmax(0), b)


@mixes
def rolled_along_the_batch(b):
    return lin(lambda s, x: (h := s.lin(x)) * h.roll(1, 0), b)


@mixes
def flipped_along_the_batch(b):
    return lin(lambda s, x: s.lin(x).flip(0), b)


@mixes
def summed_along_the_batch_step_by_step(b):
    return lin(lambda s, x: s.lin(x).cumsum(0), b)


@mixes
def scaled_by_the_largest_value_of_the_batch(b):
    return lin(lambda s, x: s.lin(x) / x.abs().max(), b)


@mixes
def first_example_added_to_all(b):
    return lin(lambda s, x: (h := s.lin(x)) + h[:1], b)


@mixes
def next_example_added(b):
    """Example b sees example b + 1 and never b - 1: changing the first example changes no other."""

    def forward(s, x):
        h = s.lin(x)
        return torch.cat([h[:-1] + h[1:], h[-1:]])

    return lin(forward, b)


@case("refused", "mixes", match=r"(?is)(mix|depend|shape)")
def similarities_between_examples(b):
    return lin(lambda s, x: (h := F.normalize(s.lin(x))) @ h.t(), b)


@mixes
def layer_norm_of_the_whole_batch(b):
    return lin(lambda s, x: (h := s.lin(x)) / h.norm(), b)


@mixes
def convolution_along_the_batch(b):
    net = Net(lambda s, x: s.conv(x.t()[None])[0].t(), conv=nn.Conv1d(4, 5, 3, padding=1))
    return net, torch.randn(b, 4), None, wave


@case("refused", "mixes", match=r".")
def gradient_that_mixes_where_the_value_does_not(b):
    return lin(lambda s, x: (h := s.lin(x)) + h.mean(0) - h.mean(0).detach(), b)


@no_graph
def branch_on_data(b):
    return lin(lambda s, x: s.lin(x) if x.sum() > 0 else s.lin(x).tanh(), b)


@case("refused", "naive", match=r"(?is)(naive|mix)")
def number_read_from_data(b):
    return lin(lambda s, x: s.lin(x) * x[0, 0].item(), b)


@no_graph
def loop_until_small(b):
    def forward(s, x):
        h = s.lin(x)
        while h.abs().max() > 0.5:
            h = h / 2
        return h

    return lin(forward, b)


@no_graph
def list_of_numbers(b):
    return lin(lambda s, x: s.lin(x) * max(x[0].tolist()), b)


@no_graph
def array_of_numpy(b):
    return lin(lambda s, x: s.lin(x) + torch.from_numpy(x.detach().numpy().copy()).sum(1, keepdim=True), b)


@no_graph
def examples_selected_by_data(b):
    return lin(lambda s, x: s.lin(x)[x[:, 0] > 0], b)


@no_graph
def shape_that_depends_on_data(b):
    return lin(lambda s, x: s.lin(x)[:, x[0].nonzero().squeeze(1).clamp(max=3)], b)


@case("refused", "naive", match=r"(?is)(naive|loss)")
def model_that_returns_a_mean_loss(b):
    net = Net(lambda s, x, y: F.cross_entropy(s.lin(x), y), lin=nn.Linear(4, 5))
    return net, (torch.randn(b, 4), labels(b)), None, lambda out, y: out


@case("refused", match=r"(?is)checkpoint.*refused\.py:\d+.*use_reentrant=False")
def reentrant_checkpoint(b):
    def forward(s, x):
        h = s.lin(x)
        return h + checkpoint(lambda h: torch.tanh(h * s.scale), h, use_reentrant=True)

    return lin(forward, b, scale=param(5))
