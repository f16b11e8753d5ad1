"""Linear layers, with any leading dimensions."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from cases.case import Net, case, labels, param, sliced_ce, wave


@case("dense")
def mlp(b):
    return (
        nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5, bias=False)),
        torch.randn(b, 7),
        labels(b),
        F.cross_entropy,
    )


@case("dense")
def mlp_with_a_loss_of_its_own(b):
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)), torch.randn(b, 7), labels(b), sliced_ce


@case("dense")
def linear_alone(b):
    return nn.Linear(4, 5), torch.randn(b, 4), torch.randn(b, 5), nn.MSELoss()


@case("dense")
def linear_to_one(b):
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.randn(b, 4), torch.randn(b), F.mse_loss


@case("dense")
def linear_on_sequences(b):
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)), torch.randn(b, 5, 4), None, wave


@case("dense")
def linear_with_three_leading_dimensions(b):
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh()), torch.randn(b, 2, 3, 4), None, wave


@case("dense")
def linear_with_a_frozen_weight(b):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    net[0].weight.requires_grad_(False)
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("dense")
def functional_linear(b):
    net = Net(
        lambda s, x: F.linear(torch.tanh(F.linear(x, s.w, s.b)), s.v),
        w=param(6, 4),
        b=param(6),
        v=param(5, 6),
    )
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("dense")
def activations_of_many_kinds(b):
    layers = [nn.SiLU(), nn.Softplus(), nn.ELU(), nn.Hardswish(), nn.Softmax(-1), nn.LogSigmoid(), nn.GLU(-1)]
    net = nn.Sequential(
        nn.Linear(4, 6), *(m for f in layers for m in (f, nn.Linear(3 if f is layers[-1] else 6, 6)))
    )
    return net, torch.randn(b, 4), None, wave


@case("dense")
def linear_on_a_transposed_input(b):
    net = Net(lambda s, x: s.lin(x.transpose(1, 2)), lin=nn.Linear(5, 3))
    return net, torch.randn(b, 5, 4), None, wave


@case("dense")
def mixer_block(b):
    def forward(s, x):
        x = x + s.tokens(s.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + s.channels(s.n2(x))

    def mix(n):
        return nn.Sequential(nn.Linear(n, 6), nn.GELU(), nn.Linear(6, n))

    net = Net(forward, tokens=mix(5), channels=mix(4), n1=nn.LayerNorm(4), n2=nn.LayerNorm(4))
    return net, torch.randn(b, 5, 4), None, wave


@case("dense")
def linear_with_a_vector_for_its_weight(b):
    return Net(lambda s, x: F.linear(x, s.w), w=param(4)), torch.randn(b, 3, 4), None, wave


@case("dense", warns=("ignore:Using a target size",))
def linear_squeezed(b):
    """Which takes the batch away, too, where there is one example."""
    net = Net(lambda s, x: s.a(x).squeeze(), a=nn.Linear(4, 1))
    return net, torch.randn(b, 4), torch.randn(b), F.mse_loss


@case("dense")
def squeezed_on_the_way(b):
    def forward(s, x):
        h = torch.tanh(x.squeeze() * s.w).reshape(x.shape[0], 1, -1)
        h = s.a(h.squeeze(1).squeeze(0)).reshape(x.shape[0], 1, -1)
        return torch.sin(h).squeeze_().reshape(x.shape[0], -1)

    return Net(forward, w=param(4), a=nn.Linear(4, 5)), torch.randn(b, 1, 4), labels(b), F.cross_entropy
