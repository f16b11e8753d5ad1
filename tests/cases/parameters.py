"""How parameters are used: shared, sliced, transformed before use, frozen, or not at all."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from cases.case import Net, case, ids, labels, param, sliced_ce, wave

OLD_WEIGHT_NORM = "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"


@case("tied")
def layer_called_twice(b):
    return Net(lambda s, x: s.lin(torch.tanh(s.lin(x))), lin=nn.Linear(4, 4)), torch.randn(b, 4), None, wave


@case("tied")
def layer_called_at_several_shapes(b):
    def forward(s, x):
        return torch.cat(
            [
                s.conv(x).flatten(1),
                s.conv(F.avg_pool2d(x, 2)).flatten(1),
                s.lin(x).flatten(1),
                s.lin(x[:, 0])[:, 0],
            ],
            1,
        )

    return Net(forward, conv=nn.Conv2d(2, 3, 2), lin=nn.Linear(6, 2)), torch.randn(b, 2, 6, 6), None, wave


@case("tied")
def block_applied_at_several_depths(b):
    def forward(s, x):
        for _ in range(3):
            x = x + s.block(x)
        return x

    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    return Net(forward, block=block), torch.randn(b, 3, 4), None, wave


@case("tied")
def weight_used_through_its_layer_and_directly(b):
    net = Net(
        lambda s, x: s.lin(x) + torch.tanh(x @ s.lin.weight.T) + s.lin.bias.square(), lin=nn.Linear(4, 6)
    )
    return net, torch.randn(b, 4), None, wave


@case("tied", "embedding")
def tied_embedding_and_head(b):
    def forward(s, i):
        return F.linear(torch.tanh(s.emb(i)), s.emb.weight).mean(1)

    return Net(forward, emb=nn.Embedding(7, 4)), ids(b, 6, 7), labels(b, 7), F.cross_entropy


@case("tied", "embedding")
def tied_embedding_and_head_as_modules(b):
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7))
    net[3].weight = net[0].weight
    return net, ids(b, 6, 7), None, wave


@case("tied")
def two_linears_of_one_weight_and_its_transpose(b):
    def forward(s, x):
        return F.linear(torch.relu(s.encode(x)), s.encode.weight.t(), s.bias)

    x = torch.randn(b, 6)
    return Net(forward, encode=nn.Linear(6, 3), bias=param(6)), x, x, F.mse_loss


@case("tied")
def module_under_two_names(b):
    lin = nn.Linear(4, 4)
    return (
        Net(lambda s, x: s.a(torch.tanh(s.b(x))) + s.c(x), a=lin, b=lin, c=nn.Linear(4, 4)),
        torch.randn(b, 4),
        None,
        wave,
    )


@case("tied")
def siamese(b):
    def forward(s, left, right):
        return (s.net(left) - s.net(right)).square()

    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Net(forward, net=net), (torch.randn(b, 4), torch.randn(b, 4)), None, wave


@case("frozen")
def frozen_backbone(b):
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, 5)
    )
    net[0].requires_grad_(False)
    net[3].weight.requires_grad_(False)
    return net, torch.randn(b, 2, 5, 5), labels(b), F.cross_entropy


@case("frozen")
def frozen_head(b):
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    net[2].requires_grad_(False)
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("unused")
def unused_parameter(b):
    return Net(lambda s, x: s.a(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2)), torch.randn(b, 3), None, wave


@case("unused")
def parameter_that_meets_a_zero(b):
    return (
        Net(lambda s, x: s.a(x) + 0.0 * s.b(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2)),
        torch.randn(b, 3),
        None,
        wave,
    )


@case("raw")
def class_token_and_positions(b):
    def forward(s, x):
        h = torch.cat([s.token.expand(x.shape[0], -1, -1), s.patch(x)], 1) + s.positions
        return s.head(torch.tanh(h)[:, 0] + h.mean(1))

    net = Net(
        forward, token=param(1, 1, 6), positions=param(1, 5, 6), patch=nn.Linear(3, 6), head=nn.Linear(6, 5)
    )
    return net, torch.randn(b, 4, 3), labels(b), F.cross_entropy


@case("raw")
def class_token_by_repeat(b):
    def forward(s, x):
        return s.head(
            torch.cat((s.token.repeat(x.size(0), 1, 1), x), dim=1) + s.positions[:, : x.size(1) + 1]
        )

    return (
        Net(forward, token=param(1, 1, 3), positions=param(1, 9, 3), head=nn.Linear(3, 2)),
        torch.randn(b, 4, 3),
        None,
        wave,
    )


@case("raw", "prelude")
def positions_resized(b):
    def forward(s, x):
        grid = F.interpolate(s.positions, size=x.shape[2:], mode="bilinear", align_corners=False)
        return torch.tanh(s.conv(x) + grid)

    return (
        Net(forward, positions=param(1, 3, 2, 2), conv=nn.Conv2d(2, 3, 1)),
        torch.randn(b, 2, 4, 3),
        None,
        wave,
    )


@case("raw")
def layer_scale(b):
    net = Net(lambda s, x: x + s.gamma * torch.tanh(s.lin(x)), gamma=param(4), lin=nn.Linear(4, 4))
    return net, torch.randn(b, 5, 4), None, wave


@case("raw")
def scalar_parameters(b):
    def forward(s, x):
        return s.lin(x) * s.log_temperature.exp() + s.shift

    net = Net(forward, lin=nn.Linear(4, 5), log_temperature=nn.Parameter(torch.tensor(0.3)), shift=param(1))
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("raw")
def parameters_by_elementwise_operations(b):
    def forward(s, x):
        h = (x - s.a) / (s.b.square() + 1) + torch.maximum(x, s.c) + torch.where(x > 0, s.d, x)
        return (
            torch.lerp(h, s.e.expand_as(h), s.f.sigmoid())
            + torch.addcmul(x, s.a, x, value=0.5)
            + x.abs().pow(s.f.exp())
        )

    net = Net(forward, a=param(4), b=param(1, 4), c=param(3, 4), d=param(3, 1), e=param(4), f=param(1))
    return net, torch.randn(b, 3, 4), None, wave


@case("raw")
def parameter_list_and_dict(b):
    def forward(s, x):
        for w in s.weights:
            x = torch.tanh(x @ w)
        return x * s.scales["a"] + s.scales["b"]

    weights = nn.ParameterList(param(4, 4) for _ in range(3))
    net = Net(forward, weights=weights, scales=nn.ParameterDict({"a": param(4), "b": param(4)}))
    return net, torch.randn(b, 4), None, wave


@case("raw")
def parameters_reached_by_a_closure(b):
    lin = nn.Linear(4, 5)
    return Net(lambda s, x: torch.tanh(x @ lin.weight.T + s.lin.bias), lin=lin), torch.randn(b, 4), None, wave


@case("raw", "may_refuse")
def parameters_kept_in_a_plain_list(b):
    """The list is no part of the module, so values passed in for these parameters may not reach it."""
    net = Net(lambda s, x: torch.tanh(x @ s.kept[0].T) * s.kept[1], a=param(5, 4), b=param(5))
    net.kept = [net.a, net.b]
    return net, torch.randn(b, 4), None, wave


@case("raw")
def output_of_parameters_alone(b):
    net = Net(lambda s, x: s.logits.expand(x.shape[0], -1) + 0 * x[:, :1], logits=param(5))
    return net, torch.randn(b, 2), labels(b), sliced_ce


@case("raw", "may_refuse")
def output_without_the_input(b):
    return (
        Net(lambda s, x: s.logits.expand(x.shape[0], -1), logits=param(5)),
        torch.randn(b, 2),
        labels(b),
        sliced_ce,
    )


@case("raw")
def gaussian_with_a_learned_deviation(b):
    def forward(s, x):
        return -0.5 * ((x - s.mean(x)) / s.log_std.exp()).square() - s.log_std

    return Net(forward, mean=nn.Linear(4, 4), log_std=param(4)), torch.randn(b, 4), None, wave


@case("raw", "prelude")
def mixture_weights_by_softmax(b):
    def forward(s, x):
        alpha = s.alpha.softmax(0)
        return sum(a * f(x) for a, f in zip(alpha, s.choices, strict=True))

    choices = nn.ModuleList([nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Tanh())])
    return Net(forward, alpha=param(2), choices=choices), torch.randn(b, 4), None, wave


@case("prelude")
def weight_norm(b):
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 5))
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("prelude", warns=(OLD_WEIGHT_NORM,))
def weight_norm_old(b):
    net = nn.Sequential(
        nn.utils.weight_norm(nn.Conv1d(2, 4, 2), dim=None),
        nn.Tanh(),
        nn.utils.weight_norm(nn.Conv1d(4, 3, 1)),
    )
    return net, torch.randn(b, 2, 5), None, wave


@case("prelude")
def spectral_norm_in_eval(b):
    return parametrizations.spectral_norm(nn.Linear(4, 6)).eval(), torch.randn(b, 4), None, wave


@case("prelude", "buffers", "may_refuse")
def spectral_norm_in_train(b):
    return parametrizations.spectral_norm(nn.Linear(4, 6)), torch.randn(b, 4), None, wave


@case("prelude", "may_refuse")
def spectral_norm_old_in_eval(b):
    return nn.utils.spectral_norm(nn.Conv1d(2, 4, 2)).eval(), torch.randn(b, 2, 5), None, wave


@case("prelude")
def orthogonal_weight(b):
    return parametrizations.orthogonal(nn.Linear(4, 4)), torch.randn(b, 4), None, wave


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


@case("prelude")
def custom_parametrization(b):
    lin = nn.Linear(4, 4)
    parametrize.register_parametrization(lin, "weight", Symmetric())
    return nn.Sequential(lin, nn.Tanh()), torch.randn(b, 3, 4), None, wave


@case("prelude")
def pruned_weight(b):
    lin = nn.Linear(4, 5)
    prune.l1_unstructured(lin, "weight", amount=0.5)
    return nn.Sequential(lin, nn.Tanh()), torch.randn(b, 4), None, wave


@case("prelude")
def weight_standardisation(b):
    def forward(s, x):
        w = s.conv.weight
        var, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
        return F.conv2d(
            x, (w - mean) * torch.rsqrt(var + 1e-5) * s.gain[:, None, None, None], s.conv.bias, padding=1
        )

    return Net(forward, conv=nn.Conv2d(2, 4, 3), gain=param(4)), torch.randn(b, 2, 4, 5), None, wave


@case("prelude")
def low_rank_adapter_on_a_frozen_base(b):
    def forward(s, x):
        return s.base(x) + (x @ s.down.t()) @ s.up.t() * 0.5

    net = Net(forward, base=nn.Linear(4, 6), down=param(2, 4), up=param(6, 2))
    net.base.requires_grad_(False)
    return net, torch.randn(b, 4), None, wave


@case("prelude")
def low_rank_adapter_merged(b):
    def forward(s, x):
        return F.linear(x, s.base.weight + 0.5 * s.up @ s.down, s.base.bias)

    net = Net(forward, base=nn.Linear(4, 6), down=param(2, 4), up=param(6, 2))
    net.base.requires_grad_(False)
    return net, torch.randn(b, 3, 4), None, wave


@case("prelude")
def concatenated_weights(b):
    def forward(s, x):
        qkv = F.linear(x, torch.cat([s.q, s.k, s.v]), torch.cat([s.bias, torch.zeros_like(s.bias), s.bias]))
        q, k, v = qkv.chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(4), -1) @ v

    return (
        Net(forward, q=param(4, 4), k=param(4, 4), v=param(4, 4), bias=param(4)),
        torch.randn(b, 5, 4),
        None,
        wave,
    )


@case("prelude", "tied")
def sliced_weights(b):
    def forward(s, x):
        return (
            torch.tanh(F.linear(x, s.w[:3], s.b[:3]))
            + F.linear(x, s.w[3:6]) * s.b[3:]
            + x[..., :3] * s.w[-1, 0]
        )

    return Net(forward, w=param(7, 4), b=param(6)), torch.randn(b, 5, 4), None, wave


@case("prelude")
def stacked_weights(b):
    def forward(s, x):
        w = torch.stack(list(s.experts))
        return torch.einsum("bt e, eti -> bi", x, torch.tanh(w))

    return (
        Net(forward, experts=nn.ParameterList(param(3, 5) for _ in range(4))),
        torch.randn(b, 3, 4),
        None,
        wave,
    )


@case("prelude")
def weight_of_a_parameter_only_network(b):
    """A hypernetwork of a learned code: the whole weight is a function of parameters."""
    net = Net(
        lambda s, x: F.linear(x, s.hyper(s.code).view(5, 4)),
        hyper=nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 20)),
        code=param(3),
    )
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("raw")
def weight_of_a_network_of_the_input(b):
    """A hypernetwork of the example: every example has a weight of its own."""

    def forward(s, x, z):
        return torch.bmm(s.hyper(z).view(-1, 5, 4), x[:, :, None]).squeeze(-1)

    net = Net(forward, hyper=nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 20)))
    return net, (torch.randn(b, 4), torch.randn(b, 3)), labels(b), F.cross_entropy


@case("prelude")
def regulariser_added_to_the_output(b):
    def forward(s, x):
        return s.lin(x).square().sum(1) + 0.01 * sum(p.square().sum() for p in s.parameters())

    return Net(forward, lin=nn.Linear(4, 5)), torch.randn(b, 4), None, lambda out, y: out


@case("prelude")
def scalar_of_a_parameter_scales_the_output(b):
    net = Net(lambda s, x: s.lin(x) * s.lin.weight.norm() / s.w.sum(), lin=nn.Linear(4, 5), w=param(3))
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("prelude")
def weight_cast_transposed_and_reshaped(b):
    def forward(s, x):
        w = s.w.permute(2, 0, 1).reshape(6, 4).contiguous().to(x.dtype).t()
        return (
            torch.tanh(x @ w) @ s.w.flatten(0, 1)[:6].flip(0)
            + s.w.expand(2, 3, 2, 4)[1].sum((0, 1)).repeat(1)[:4]
        )

    return Net(forward, w=param(3, 2, 4)), torch.randn(b, 5, 4), None, wave


@case("prelude")
def mixture_of_experts_with_a_gate(b):
    def forward(s, x):
        gate = s.gate(x).softmax(-1)
        top, index = gate.topk(2, -1)
        sparse = torch.zeros_like(gate).scatter(-1, index, top)
        return torch.einsum("be,bi,eio->bo", sparse, x, s.experts)

    return (
        Net(forward, gate=nn.Linear(4, 3), experts=param(3, 4, 5)),
        torch.randn(b, 4),
        labels(b),
        F.cross_entropy,
    )


@case("raw")
def gaussian_policy(b):
    """The log-probability of actions, whose mean depends on the state and whose scale does not."""

    def forward(s, state, action):
        return torch.distributions.Normal(s.mean(state), s.log_scale.exp()).log_prob(action)

    return (
        Net(forward, mean=nn.Linear(3, 2), log_scale=param(2)),
        (torch.randn(b, 3), torch.randn(b, 2)),
        None,
        wave,
    )
