"""Models that draw random numbers: held to one ordinary forward with the same seed."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.ops import StochasticDepth

from cases.case import Net, case, ids, labels, param, wave


@case("random")
def dropout(b):
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 5))
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("random", "conv")
def dropout_of_channels(b):
    def forward(s, x):
        return F.feature_alpha_dropout(s.drop(s.conv(x)), 0.3, training=s.training)

    return Net(forward, conv=nn.Conv2d(2, 6, 2), drop=nn.Dropout2d(0.4)), torch.randn(b, 2, 4, 4), None, wave


@case("random")
def noise_added(b):
    def forward(s, x):
        h = s.lin(x + 0.1 * torch.randn(x.shape[0], 4))
        return h + torch.rand_like(h) * s.scale + torch.bernoulli(torch.full_like(h, 0.5))

    return Net(forward, lin=nn.Linear(4, 5), scale=param(5)), torch.randn(b, 4), None, wave


@case("random")
def stochastic_depth(b):
    net = Net(
        lambda s, x: x + s.drop(torch.tanh(s.lin(x))), lin=nn.Linear(4, 4), drop=StochasticDepth(0.5, "row")
    )
    return net, torch.randn(b, 4), None, wave


@case("random")
def randomised_relu_and_gumbel_softmax(b):
    net = Net(lambda s, x: F.gumbel_softmax(s.act(s.lin(x)), tau=0.7), lin=nn.Linear(4, 5), act=nn.RReLU())
    return net, torch.randn(b, 4), None, wave


@case("random")
def variational_autoencoder(b):
    def forward(s, x):
        mean, log_var = s.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return s.decode(z), -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)

    net = Net(forward, encode=nn.Linear(6, 4), decode=nn.Linear(2, 6))
    x = torch.randn(b, 6)
    return net, x, x, lambda out, y: (out[0] - y).square().sum(1) + out[1]


@case("random", "attention")
def transformer_with_dropout(b):
    return (
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True),
        torch.randn(b, 3, 4),
        None,
        wave,
    )


@case("random", "recurrent", "embedding")
def recurrent_with_dropout(b):
    def forward(s, i):
        return s.out(s.rnn(s.emb(i))[0][:, -1])

    net = Net(
        forward,
        emb=nn.Embedding(7, 3),
        rnn=nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True),
        out=nn.Linear(4, 5),
    )
    return net, ids(b, 4, 7), labels(b), F.cross_entropy


@case("random")
def distribution_inside_forward(b):
    """Its checks, which are on by default, would read numbers from activations."""

    def forward(s, x):
        mean, scale = s.lin(x).chunk(2, 1)
        belief = torch.distributions.Normal(mean, scale.exp())
        drawn = belief.rsample()
        return torch.cat([s.out(drawn), belief.log_prob(drawn)], 1)

    return Net(forward, lin=nn.Linear(4, 6), out=nn.Linear(3, 2)), torch.randn(b, 4), None, wave
