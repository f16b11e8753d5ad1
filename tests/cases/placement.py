"""Where the batch is: first, elsewhere, or folded into another dimension in either order."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

from cases.case import Net, case, ids, labels, param, wave


@case("fold")
def time_major(b):
    def forward(s, x):
        x = x.transpose(0, 1)  # (T, B, C)
        return s.out(torch.tanh(s.lin(x))).transpose(0, 1)

    return Net(forward, lin=nn.Linear(4, 6), out=nn.Linear(6, 3)), torch.randn(b, 5, 4), None, wave


@case("fold")
def time_major_to_the_loss(b):
    net = Net(lambda s, x: s.lin(x.transpose(0, 1)), lin=nn.Linear(4, 3))
    return net, torch.randn(b, 5, 4), None, lambda out, y: wave(out.transpose(0, 1))


@case("fold")
def batch_on_the_last_dimension(b):
    def forward(s, x):
        x = x.movedim(0, -1)  # (C, T, B)
        return (s.scale[:, None, None] * x + s.shift[:, None]).movedim(-1, 0)

    return Net(forward, scale=param(4), shift=param(5)), torch.randn(b, 4, 5), None, wave


@case("fold")
def time_inside_the_batch(b):
    def forward(s, x):  # (B*T, C)
        h = torch.tanh(s.lin(x.flatten(0, 1)))
        return s.out(s.norm(h)).view(x.shape[0], x.shape[1], -1)

    return (
        Net(forward, lin=nn.Linear(4, 6), norm=nn.LayerNorm(6), out=nn.Linear(6, 3)),
        torch.randn(b, 5, 4),
        None,
        wave,
    )


@case("fold")
def batch_inside_time(b):
    def forward(s, x):  # (T*B, C)
        h = torch.tanh(s.lin(x.transpose(0, 1).reshape(-1, 4)))
        return s.out(s.norm(h)).view(x.shape[1], x.shape[0], -1).transpose(0, 1)

    return (
        Net(forward, lin=nn.Linear(4, 6), norm=nn.LayerNorm(6), out=nn.Linear(6, 3)),
        torch.randn(b, 5, 4),
        None,
        wave,
    )


@case("fold", "conv")
def frames_inside_the_batch(b):
    def forward(s, x):  # (B, T, C, H, W): a convolution over frames, then a head over time
        h = torch.tanh(s.norm(s.conv(x.flatten(0, 1)))).mean((2, 3))
        return s.head(h.view(x.shape[0], -1))

    net = Net(forward, conv=nn.Conv2d(2, 4, 2), norm=nn.GroupNorm(2, 4), head=nn.Linear(12, 5))
    return net, torch.randn(b, 3, 2, 4, 4), labels(b), F.cross_entropy


@case("fold", "conv")
def batch_inside_frames(b):
    def forward(s, x):
        h = torch.tanh(s.conv(rearrange(x, "b t c h w -> (t b) c h w")))
        return rearrange(h, "(t b) c h w -> b (t c h w)", b=x.shape[0])

    return Net(forward, conv=nn.Conv2d(2, 4, 2)), torch.randn(b, 3, 2, 4, 4), None, wave


@case("fold", "conv")
def channels_inside_the_batch(b):
    """One kernel for every channel: (B*C, 1, T)."""

    def forward(s, x):
        return torch.tanh(s.conv(x.reshape(-1, 1, x.shape[2]))).view(x.shape[0], -1)

    return Net(forward, conv=nn.Conv1d(1, 2, 3)), torch.randn(b, 4, 6), None, wave


@case("fold", "embedding")
def embedding_in_a_fold(b):
    net = Net(lambda s, i: torch.tanh(s.emb(i.flatten())).view(*i.shape, -1), emb=nn.Embedding(7, 4))
    return net, ids(b, 6, 7), None, wave


@case("fold", "embedding")
def embedding_time_major(b):
    net = Net(
        lambda s, i: torch.tanh(s.emb(i.t()) + s.pos[:, None]).transpose(0, 1),
        emb=nn.Embedding(7, 4),
        pos=param(6, 4),
    )
    return net, ids(b, 6, 7), None, wave


@case("fold")
def windows(b):
    """A partition into windows, as Swin does it: batch outermost in the fold."""

    def forward(s, x):  # (B, H, W, C)
        h = x.view(x.shape[0], 2, 2, 2, 3, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 6, 4)
        h = h + s.proj(torch.softmax(s.q(h) @ s.k(h).transpose(1, 2) + s.bias, -1) @ h)
        return h.view(-1, 2, 2, 2, 3, 4).permute(0, 1, 3, 2, 4, 5).reshape(x.shape)

    net = Net(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 4), proj=nn.Linear(4, 4), bias=param(6, 6))
    return net, torch.randn(b, 4, 6, 4), None, wave


@case("fold")
def windows_with_the_batch_innermost(b):
    def forward(s, x):
        h = rearrange(x, "b (n t) c -> (n b) t c", n=2)
        return rearrange(torch.tanh(s.lin(h) * s.scale[:, None]), "(n b) t c -> b (n t) c", n=2)

    return Net(forward, lin=nn.Linear(4, 4), scale=param(3)), torch.randn(b, 6, 4), None, wave


@case("fold")
def batch_in_the_middle_of_a_fold(b):
    def forward(s, x):
        h = rearrange(x, "b n t c -> (n b t) c")
        return rearrange(torch.tanh(s.lin(h)), "(n b t) c -> b n t c", n=2, t=3)

    return Net(forward, lin=nn.Linear(4, 3)), torch.randn(b, 2, 3, 4), None, wave


@case("fold")
def heads_inside_the_batch(b):
    def forward(s, x):
        q, k, v = (f(x).view(-1, 5, 2, 2).transpose(1, 2).reshape(-1, 5, 2) for f in (s.q, s.k, s.v))
        h = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        return s.out(h.view(-1, 2, 5, 2).transpose(1, 2).reshape(-1, 5, 4))

    net = Net(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4), out=nn.Linear(4, 3))
    return net, torch.randn(b, 5, 4), None, wave


@case("fold")
def two_views_concatenated_along_the_batch(b):
    """A siamese network in one pass: (2*B, C), the batch innermost."""

    def forward(s, x, z):
        left, right = s.net(torch.cat([x, z])).chunk(2)
        return (left - right).square()

    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Net(forward, net=net), (torch.randn(b, 4), torch.randn(b, 4)), None, wave


@case("fold")
def examples_repeated(b):
    def forward(s, x):
        return (
            s.lin(x.repeat_interleave(2, 0) * s.scale).view(-1, 2, 3).tanh().sum(1)
            + s.lin(x.repeat(2, 1)).view(2, -1, 3)[0]
        )

    return Net(forward, lin=nn.Linear(4, 3), scale=param(4)), torch.randn(b, 4), None, wave


@case("fold", "may_refuse")
def crops_of_two_sizes_concatenated_along_the_batch(b):
    """(B*3 + B*2, C): no fold of one factor."""

    def forward(s, x, z):
        h = torch.tanh(s.lin(torch.cat([x.flatten(0, 1), z.flatten(0, 1)])))
        return torch.cat([h[: x.shape[0] * 3].view(-1, 3, 3), h[x.shape[0] * 3 :].view(-1, 2, 3)], 1)

    return Net(forward, lin=nn.Linear(4, 3)), (torch.randn(b, 3, 4), torch.randn(b, 2, 4)), None, wave


@case("fold", batch=4)
def batch_equal_to_every_other_size(b):
    def forward(s, x):
        return s.lin(torch.tanh(s.w @ x) + s.scale[:, None]).transpose(1, 2) @ s.w

    return Net(forward, lin=nn.Linear(4, 4), w=param(4, 4), scale=param(4)), torch.randn(b, 4, 4), None, wave


@case("fold", "conv", batch=3)
def batch_equal_to_channels_and_kernel(b):
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 3, groups=3))
    return net, torch.randn(b, 3, 3, 3), None, wave


@case("fold", batch=5)
def batch_equal_to_time_in_a_fold(b):
    def forward(s, x):
        return s.lin(x.reshape(-1, 4)).view(-1, 5, 5).transpose(1, 2) * s.scale

    return Net(forward, lin=nn.Linear(4, 5), scale=param(5)), torch.randn(b, 5, 4), None, wave


@case("fold", "may_refuse")
def one_forward_for_each_example(b):
    net = Net(lambda s, x: torch.stack([s.conv(example) for example in x]), conv=nn.Conv1d(2, 3, 2))
    return net, torch.randn(b, 2, 5), None, wave


@case("fold")
def heads_by_task(b):
    """Time-major tokens, a head for each task: no token of the first examples reaches most of them."""

    def forward(s, x, task):
        tokens, task = x.transpose(0, 1).flatten(0, 1), task.repeat(2)
        out = sum((task == i)[:, None] * head(tokens).tanh() for i, head in enumerate(s.heads))
        return out.unflatten(0, (2, -1)).transpose(0, 1)

    heads = nn.ModuleList(nn.Linear(3, 4) for _ in range(4))
    return Net(forward, heads=heads), (torch.randn(b, 2, 3), (torch.arange(b) + 1) // 3), None, wave


@case("fold")
def last_of_a_fold(b):
    """Gradients arrive at one position of each example alone, which by itself would fit either order of the fold."""

    def forward(s, x):
        h = torch.addmm(s.bias, x.flatten(0, 1), s.weight).tanh().unflatten(0, (-1, 7))
        return h[torch.arange(x.shape[0]), -1]

    return Net(forward, bias=param(5), weight=param(4, 5)), torch.randn(b, 7, 4), None, wave


@case("fold")
def values_of_the_inputs_kind(b):
    """Tensors that take a shape, a dtype or a number of examples from the inputs, and none of their data."""

    def forward(s, x):
        n = x.shape[0]
        shared = (
            s.a(x.new_zeros(1, 4)) + s.a(torch.ones_like(x[:1])) + s.e(torch.zeros(n, 2).long()[0]).sum(0)
        )
        prompt = s.e(torch.arange(2)[None].expand(n, -1)[:1]).repeat(n, 1, 1)
        return s.a(x) * shared + prompt.sum(1)

    return Net(forward, a=nn.Linear(4, 4), e=nn.Embedding(3, 4)), torch.randn(b, 4), None, wave
