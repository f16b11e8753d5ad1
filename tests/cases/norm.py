"""Normalisations whose examples are independent."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from cases.case import Net, case, labels, param, wave


def eval_with_statistics(model):
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@case("norm")
def layer_norm(b):
    net = nn.Sequential(nn.LayerNorm([3, 4]), nn.Linear(4, 4), nn.LayerNorm(4, bias=False), nn.Tanh())
    return net, torch.randn(b, 3, 4), None, wave


@case("norm")
def layer_norm_of_vectors(b):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6, eps=1e-2), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 5)
    )
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("norm")
def layer_norm_over_channels(b):
    def forward(s, x):
        x = s.conv(x)
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        return (x - mean) / (var + 1e-6).sqrt() * s.scale[:, None, None] + s.shift[:, None, None]

    return (
        Net(forward, conv=nn.Conv2d(2, 4, 2), scale=param(4), shift=param(4)),
        torch.randn(b, 2, 4, 5),
        None,
        wave,
    )


@case("norm")
def group_norm(b):
    net = nn.Sequential(nn.Conv1d(3, 6, 3), nn.GroupNorm(3, 6), nn.Tanh(), nn.GroupNorm(1, 6))
    return net, torch.randn(b, 3, 7), None, wave


@case("norm")
def group_norm_of_vectors_and_frozen_scale(b):
    net = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 5))
    net[1].weight.requires_grad_(False)
    return net, torch.randn(b, 4), labels(b), F.cross_entropy


@case("norm")
def rms_norm(b):
    net = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 6), nn.RMSNorm([5, 6], eps=1e-3))
    return net, torch.randn(b, 5, 4), None, wave


@case("norm")
def rms_norm_of_complex_numbers(b):
    def forward(s, x):
        h = F.rms_norm(torch.complex(x, x.sin()), (4,), torch.view_as_complex(s.w))
        return torch.view_as_real(torch.tanh(h) + F.rms_norm(h, (4,), s.r)).flatten(1)

    return Net(forward, w=param(4, 2), r=param(4)), torch.randn(b, 5, 4), None, wave


@case("norm")
def rms_norm_by_hand(b):
    def forward(s, x):
        h = s.lin(x)
        return s.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    return Net(forward, lin=nn.Linear(4, 6), scale=param(6)), torch.randn(b, 5, 4), None, wave


@case("norm")
def instance_norm(b):
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )
    return net, torch.randn(b, 3, 6, 6), labels(b), F.cross_entropy


@case("norm")
def instance_norm_1d_and_3d(b):
    def forward(s, x):
        return s.three(s.one(x).view(-1, 2, 2, 2, 3))

    net = Net(forward, one=nn.InstanceNorm1d(4, affine=True), three=nn.InstanceNorm3d(2, affine=True))
    return net, torch.randn(b, 4, 6), None, wave


@case("norm", "buffers")
def instance_norm_that_tracks_statistics(b):
    net = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True), nn.Tanh()
    )
    return net, torch.randn(b, 2, 6), None, wave


@case("norm")
def instance_norm_in_eval(b):
    net = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True), nn.Tanh()
    )
    return eval_with_statistics(net), torch.randn(b, 2, 6), None, wave


@case("norm")
def batch_norm_in_eval(b):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
    return eval_with_statistics(net), torch.randn(b, 3, 5, 5), labels(b), F.cross_entropy


@case("norm")
def batch_norm_1d_in_eval(b):
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 5)
    )
    return eval_with_statistics(net), torch.randn(b, 4), labels(b), F.cross_entropy


@case("norm")
def batch_norm_3d_in_eval(b):
    return (
        eval_with_statistics(nn.Sequential(nn.BatchNorm3d(2), nn.Tanh())),
        torch.randn(b, 2, 3, 2, 2),
        None,
        wave,
    )


@case("norm", "fold")
def batch_norm_in_eval_over_tokens(b):
    def forward(s, x):
        return s.bn(s.lin(x).flatten(0, 1)).view_as(x)

    net = eval_with_statistics(Net(forward, lin=nn.Linear(4, 4), bn=nn.BatchNorm1d(4)))
    return net, torch.randn(b, 5, 4), None, wave


@case("norm")
def frozen_batch_norm_from_buffers(b):
    def forward(s, x):
        x = s.conv(x)
        return torch.tanh((x - s.mean[:, None]) * s.var[:, None].rsqrt() * s.scale[:, None])

    net = Net(forward, conv=nn.Conv1d(2, 3, 2), scale=param(3))
    net.register_buffer("mean", torch.randn(3))
    net.register_buffer("var", torch.rand(3) + 0.5)
    return net, torch.randn(b, 2, 5), None, wave


@case("norm")
def local_response_and_unit_norm(b):
    def forward(s, x):
        return s.out(F.normalize(F.local_response_norm(s.conv(x), 3).flatten(1), dim=-1))

    return (
        Net(forward, conv=nn.Conv2d(2, 4, 3), out=nn.Linear(16, 5)),
        torch.randn(b, 2, 4, 4),
        labels(b),
        F.cross_entropy,
    )
