"""Weights that are computed from parameters, by operations that a factor goes through and by others."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize

from cases.case import Net, case, ids, labels, param, wave


class LowRank(nn.Module):
    """w + 2 b a."""

    def __init__(self, outputs, inputs, rank=2):
        super().__init__()
        self.a, self.b = param(rank, inputs), param(outputs, rank)

    def forward(self, w):
        return w + (self.b @ self.a) * 2.0


@case()
def low_rank_updates_merged_into_frozen_weights(b):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).requires_grad_(False)
    for layer in (net[0], net[2]):
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    return net, torch.randn(b, 3, 4), None, wave


@case("tied")
def low_rank_update_used_twice_beside_its_own_factor(b):
    def forward(s, x):
        w = torch.addmm(s.w, s.b, s.a, beta=0.5, alpha=-3)
        h = torch.tanh(F.linear(x, w))
        return F.linear(h, w.t()) + F.linear(x, s.a.mT @ s.a)

    return Net(forward, w=param(4, 4), a=param(2, 4), b=param(4, 2)), torch.randn(b, 3, 4), None, wave


@case("tied")
def weight_times_itself_and_its_transpose(b):
    def forward(s, x):
        return x @ (s.w @ s.w - s.w.T / 2) + x @ (1 - s.w + s.w.t())

    return Net(forward, w=param(4, 4)), torch.randn(b, 4), None, wave


@case()
def product_of_three_matrices_one_of_which_is_a_buffer(b):
    net = Net(lambda s, x: (x @ (s.u @ s.fixed @ s.v).mT).relu(), u=param(7, 3), v=param(2, 8))
    net.register_buffer("fixed", torch.randn(3, 2))
    return net, torch.randn(b, 2, 8), None, wave


@case()
def low_rank_weights_of_heads(b):
    def forward(s, x):  # (b, h, t, i) by (h, i, o)
        return torch.matmul(x, torch.bmm(s.u, s.v) * s.scale).flatten(1)

    net = Net(forward, u=param(2, 4, 3), v=param(2, 3, 5))
    net.register_buffer("scale", torch.tensor(0.7))
    return net, torch.randn(b, 2, 3, 4), None, wave


@case()
def low_rank_weights_of_heads_turned(b):
    def forward(s, x):
        return torch.matmul(x, (s.u @ s.v).transpose(1, 2)).flatten(1) + torch.einsum(
            "bhti,hoi->bhto", x, s.u @ s.v
        ).flatten(1)

    return Net(forward, u=param(2, 5, 3), v=param(2, 3, 4)), torch.randn(b, 2, 3, 4), None, wave


@case()
def matrices_that_heads_share(b):
    def forward(s, x):
        first, second = s.u @ s.shared, s.one @ s.v  # (h, i, r) by (r, o), and (1, i, r) by (h, r, o)
        return (torch.matmul(x, first) + torch.matmul(x, second)).flatten(1) + (s.v.permute(2, 1, 0) * 2).sum(
            0
        )[:1, 0]

    net = Net(forward, u=param(2, 4, 3), shared=param(3, 5), one=param(1, 4, 3), v=param(2, 3, 5))
    return net, torch.randn(b, 2, 3, 4), None, wave


@case("recurrent")
def recurrence_with_a_low_rank_weight(b):
    def forward(s, x):
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = torch.tanh(F.linear(x[:, t], s.w) + F.linear(h, s.u @ s.v, s.bias + 1))
        return h

    net = Net(forward, w=param(3, 4), u=param(3, 1), v=param(1, 3), bias=param(3))
    return net, torch.randn(b, 4, 4), None, wave


@case("norm")
def scales_that_are_stored_as_what_they_differ_from_one(b):
    def forward(s, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + s.scale)
        x = F.layer_norm(x, (4,), torch.rsub(s.weight, 1, alpha=2), -s.bias)
        return F.linear(x, s.w, (s.shift - s.bias) / 3)

    net = Net(forward, scale=param(4), weight=param(4), bias=param(4), w=param(4, 4), shift=param(1))
    return net, torch.randn(b, 3, 4), None, wave


@case("embedding")
def relative_positions_by_an_embedding(b):
    def forward(s, x):
        bias = s.table(s.places).permute(2, 0, 1)  # (h, t, t)
        return (x @ x.mT + bias + s.again[(s.places - 7).reshape(-1)].view(4, 4, 2).permute(2, 0, 1)).softmax(
            -1
        )

    net = Net(forward, table=nn.Embedding(7, 2), again=param(7, 2))
    net.register_buffer("places", (torch.arange(4)[:, None] - torch.arange(4)) + 3)
    return net, torch.randn(b, 2, 4, 3), None, wave


@case("embedding")
def first_positions_of_larger_tables(b):
    def forward(s, i):
        at = torch.arange(i.shape[1])
        x = s.words(i) + 0.5 * s.places(at) + s.padded(at % 3) + torch.index_select(s.more, 0, at)
        return (x * s.first[0] * s.rest[:1]).mean(1)

    net = Net(
        forward, words=nn.Embedding(7, 4), places=nn.Embedding(9, 4), padded=nn.Embedding(9, 4, padding_idx=1),
        more=param(8, 4), first=param(2, 4), rest=param(2, 4),
    )  # fmt: skip
    return net, ids(b, 5, 7), labels(b, 4), F.cross_entropy


@case("conv")
def convolution_with_a_low_rank_update(b):
    def forward(s, x):
        return F.conv2d(x, s.w + (s.u @ s.v).view(3, 2, 2, 2), s.bias * 2)

    return (
        Net(forward, w=param(3, 2, 2, 2), u=param(3, 2), v=param(2, 8), bias=param(3)),
        torch.randn(b, 2, 4, 4),
        None,
        wave,
    )


@case()
def weights_written_into_and_scaled_by_a_parameter(b):
    def forward(s, x):
        w = s.u @ s.v
        w.mul_(2.0)
        return F.linear(x, w) + F.linear(x, s.alpha * (s.u @ s.v)) + F.linear(x, s.column * (s.u @ s.v))

    return (
        Net(forward, u=param(5, 2), v=param(2, 4), alpha=nn.Parameter(torch.randn(())), column=param(5, 1)),
        torch.randn(b, 4),
        None,
        wave,
    )


@case()
def low_rank_weight_cut_off_in_part(b):
    def forward(s, x):
        with torch.no_grad():
            fixed = s.u @ s.v
        return F.linear(x, fixed - s.u.detach() @ s.v + s.u @ s.v.detach() * 3)

    return Net(forward, u=param(5, 2), v=param(2, 4)), torch.randn(b, 4), None, wave


@case()
def low_rank_weight_with_more_positions_than_it_pays(b):
    net = Net(lambda s, x: F.linear(x, s.u @ s.v), u=param(3, 3), v=param(3, 3))
    return net, torch.randn(b, 40, 3), None, wave


def normalised(outputs, inputs):
    return parametrizations.weight_norm(nn.Linear(inputs, outputs))


@case("tied")
def normalised_weights_at_several_positions(b):
    def forward(s, x):
        h = torch.tanh(s.one(x))
        for _ in range(2):
            h = torch.tanh(s.again(h))
        return s.last(h)

    net = Net(forward, one=normalised(4, 3), again=normalised(4, 4), last=normalised(2, 4))
    return net, torch.randn(b, 2, 3), None, wave


@case()
def normalised_weights_of_one_number_a_line(b):
    """The length of each line is all that counts: what is left of its gradient is rounding."""
    return nn.Sequential(normalised(4, 1), nn.Tanh(), normalised(1, 4)), torch.randn(b, 1), None, wave


@case()
def weights_by_their_spectral_norms(b):
    net = nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(2))).eval()
    return net, torch.randn(b, 3, 4), None, wave


@case("tied")
def weights_scaled_by_what_they_are(b):
    def forward(s, x):
        w = s.w / torch.dot(s.p, s.w @ s.q)
        return F.linear(x, w * s.alpha + s.column * s.w * s.w[0, 0], s.bias * s.w[:, 0] / s.column[:, 0])

    net = Net(
        forward, w=param(4, 4), p=param(4), q=param(4), column=param(4, 1), bias=param(4),
        alpha=nn.Parameter(torch.randn(())),
    )  # fmt: skip
    return net, torch.randn(b, 2, 4), None, wave


class Pruned(nn.Module):
    """A weight under a mask, as torch.nn.utils.prune has it."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("mask", (torch.rand_like(weight) > 0.5).to(weight.dtype))

    def forward(self, w):
        return w * self.mask


def pruned(layer):
    parametrize.register_parametrization(layer, "weight", Pruned(layer.weight))
    return layer


@case()
def pruned_layers(b):
    net = nn.Sequential(pruned(nn.Linear(4, 6)), nn.Tanh(), pruned(nn.Linear(6, 5)))
    return net, torch.randn(b, 4), None, wave


@case("conv")
def pruned_convolutions(b):
    net = nn.Sequential(pruned(nn.Conv2d(3, 4, 3)), nn.Tanh(), pruned(nn.Conv2d(4, 4, 2, groups=2)))
    return net, torch.randn(b, 3, 6, 6), None, wave


@case()
def pruned_layers_at_several_positions(b):
    net = nn.Sequential(pruned(nn.Linear(4, 6)), nn.Tanh(), pruned(nn.Linear(6, 5)))
    return net, torch.randn(b, 3, 4), None, wave


@case()
def weights_cut_to_triangles_and_chosen(b):
    def forward(s, x):
        w = torch.where(s.mask, s.u, 2 * s.v)
        x = torch.tanh(x @ s.u.tril() + F.linear(x, w.masked_fill(s.mask[0], 0.5).T))
        return F.linear(x, s.v.triu(1) + torch.where(s.mask[:, :1], s.column, 0))

    net = Net(forward, u=param(4, 4), v=param(4, 4), column=param(4, 1))
    net.register_buffer("mask", torch.rand(4, 4) > 0.5)
    return net, torch.randn(b, 4), None, wave


@case()
def square_roots_behind_a_mask(b):
    """Where their derivatives are infinite, no gradient goes on."""

    def forward(s, x):
        return F.linear(x, s.w.masked_fill(s.mask, 0).abs().sqrt())

    net = Net(forward, w=param(3, 4))
    net.register_buffer("mask", torch.eye(3, 4).bool())
    return net, torch.randn(b, 4), None, wave


@case()
def directions_of_classes(b):
    def forward(s, x):
        return (
            F.linear(F.normalize(torch.tanh(x @ F.normalize(s.body, dim=0)), dim=-1), F.normalize(s.head))
            * s.scale.exp()
        )

    net = Net(forward, body=param(4, 5), head=param(6, 5), scale=nn.Parameter(torch.ones(())))
    return net, torch.randn(b, 4), labels(b, 6), F.cross_entropy


@case()
def directions_at_several_positions(b):
    def forward(s, x):
        return (x @ F.normalize(s.body, dim=0)).tanh() @ F.normalize(s.head, eps=1e-3).T

    return Net(forward, body=param(4, 5), head=param(6, 5)), torch.randn(b, 3, 4), None, wave


@case("embedding")
def directions_of_words(b):
    net = Net(lambda s, i: F.embedding(i, F.normalize(s.table)) @ F.normalize(s.table).T, table=param(7, 4))
    return net, ids(b, 3, 7), None, wave


@case()
def weights_by_functions_of_parameters(b):
    def forward(s, x):
        x = torch.tanh(F.linear(x, F.softplus(s.u, beta=2, threshold=1), s.bias.tanh()))
        x = torch.tanh(F.linear(x, s.v.exp().clamp(max=2), s.bias.sigmoid()))
        x = torch.tanh(
            F.linear(x, s.w**2 - s.w.square() / 2 + s.w.relu() * s.w.abs(), s.bias.sin() + s.bias.cos())
        )
        return F.linear(x, 1 / (s.u.abs() + 1), (s.bias.square() + 1).sqrt().log() + (s.bias**2 + 1).rsqrt())

    net = Net(forward, u=param(4, 4), v=param(4, 4), w=param(4, 4), bias=param(4))
    return net, torch.randn(b, 4), None, wave


@case("tied")
def weights_by_their_sizes(b):
    def forward(s, x):
        centred = s.w - s.w.mean(1, keepdim=True)
        x = torch.tanh(
            F.linear(x, centred / (centred.square().mean(1, keepdim=True) + 0.1).sqrt(), s.w.sum(0))
        )
        x = torch.tanh(F.linear(x, s.v / torch.linalg.vector_norm(s.v) + s.v.mean().expand(4, 4), s.v.sum(1)))
        return F.linear(x, s.v.T - s.v.T.sum() * s.v.t().flatten().view(4, 4), s.w.mean((0, 1)).expand(4))

    return Net(forward, w=param(4, 4), v=param(4, 4)), torch.randn(b, 2, 4), None, wave


@case("conv")
def normalised_convolutions_of_few_positions(b):
    """So few that their norms are by pairs of positions."""
    layers = (
        nn.Conv2d(4, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(16, 32, 2),
    )
    net = nn.Sequential(*(parametrizations.weight_norm(m) if hasattr(m, "weight") else m for m in layers))
    net.insert(4, nn.Flatten(2))
    return net, torch.randn(b, 4, 2, 2), None, wave


class Standardised(nn.Conv2d):
    """With a weight of mean zero and deviation one for each of its outputs."""

    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        w = (self.weight - mean) * torch.rsqrt(
            self.weight.var((1, 2, 3), keepdim=True, unbiased=False) + 1e-5
        )
        return self._conv_forward(x, w, self.bias)


@case("conv")
def standardised_convolutions(b):
    net = nn.Sequential(
        Standardised(4, 16, 3, padding=1), nn.Tanh(), Standardised(16, 16, 3, padding=1, groups=2),
    )  # fmt: skip
    return net, torch.randn(b, 4, 2, 2), None, wave


@case()
def weights_by_their_spreads(b):
    def forward(s, x):
        x = torch.tanh(F.linear(x, (s.w - s.w.mean(1, keepdim=True)) / s.w.std(1, keepdim=True), s.w.var(0)))
        return F.linear(x, s.w / s.w.std() + s.w.var(unbiased=False), s.w.std((0, 1)).expand(4))

    return Net(forward, w=param(4, 4)), torch.randn(b, 4), None, wave


@case()
def numbers_without_dimensions(b):
    def forward(s, x):
        n = 2 * s.n
        same = (
            n.transpose(0, -1) + n.permute(()) + n.t() + n.squeeze(0) + n.sum(0) + n.mean(-1) + n.norm(dim=0)
        )
        return x * same + (s.n / s.n.norm()).sum(0) + (s.n / (1 + s.n.norm())).sum(0).mean()

    return Net(forward, n=nn.Parameter(torch.tensor(0.7))), torch.randn(b, 4), None, wave


@case()
def number_by_its_size(b):
    net = Net(lambda s, x: x * (s.n / (2 + s.n.norm())).sum(0), n=nn.Parameter(torch.tensor(0.7)))
    return net, torch.randn(b, 4), None, wave
