"""Attention: the layers of torch in both layouts, and what people write around them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

from cases.case import Net, case, ids, labels, param, wave


def self_attention(b, *, weights=False, mask=None, **options):
    def forward(s, x):
        h = x if s.mha.batch_first else x.transpose(0, 1)
        out, w = s.mha(h, h, h, need_weights=weights, attn_mask=s.mask, is_causal=False)
        out = out if s.mha.batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), w.flatten(1)], 1) if weights else out

    net = Net(forward, mha=nn.MultiheadAttention(4, 2, **options), mask=mask)
    return net, torch.randn(b, 5, 4), None, wave


@case("attention")
def mha(b):
    return self_attention(b, batch_first=True)


@case("attention", "fold")
def mha_time_major(b):
    return self_attention(b)


@case("attention")
def mha_with_weights(b):
    return self_attention(b, batch_first=True, weights=True)


@case("attention")
def mha_without_bias_and_with_zero_attention(b):
    return self_attention(b, bias=False, add_zero_attn=True, batch_first=True)


@case("attention", "fold")
def mha_with_learned_key_and_value(b):
    return self_attention(b, add_bias_kv=True)


@case("attention")
def mha_with_a_causal_mask(b):
    return self_attention(b, mask=torch.ones(5, 5, dtype=torch.bool).triu(1), batch_first=True)


@case("attention")
def mha_with_padding(b):
    def forward(s, x, padding):
        return s.mha(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    padding = torch.arange(5)[None] > torch.arange(b)[:, None] % 4 + 1
    return (
        Net(forward, mha=nn.MultiheadAttention(4, 2, batch_first=True)),
        (torch.randn(b, 5, 4), padding),
        None,
        wave,
    )


@case("attention")
def mha_across_sizes(b):
    net = nn.MultiheadAttention(4, 2, kdim=3, vdim=6, batch_first=True)
    return (
        net,
        (torch.randn(b, 2, 4), torch.randn(b, 5, 3), torch.randn(b, 5, 6)),
        None,
        lambda o, y: wave(o[0]),
    )


@case("attention")
def transformer_encoder_layer(b):
    return (
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        torch.randn(b, 5, 4),
        None,
        wave,
    )


@case("attention", "fold")
def transformer_encoder_time_major(b):
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, norm_first=True, activation="gelu")
    net = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
    return (
        Net(lambda s, x: s.net(x.transpose(0, 1)).transpose(0, 1), net=net),
        torch.randn(b, 3, 4),
        None,
        wave,
    )


@case("attention")
def transformer_encoder_in_eval(b):
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(b, 3, 4), None, wave


@case("attention")
def transformer_decoder_layer(b):
    net = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    return net, (torch.randn(b, 3, 4), torch.randn(b, 5, 4)), None, wave


@case("attention")
def transformer(b):
    net = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)
    return net, (torch.randn(b, 3, 4), torch.randn(b, 2, 4)), None, wave


@case("attention")
def attention_by_hand(b):
    def forward(s, x):
        q, k, v = rearrange(s.qkv(x), "b t (n h c) -> n b h t c", n=3, h=2)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.out(rearrange(h, "b h t c -> b t (h c)"))

    return Net(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)), torch.randn(b, 5, 4), None, wave


@case("attention")
def attention_with_a_learned_mask_and_query(b):
    def forward(s, x):
        q = s.query.expand(x.shape[0], -1, -1, -1)
        k, v = (f(x).unflatten(2, (2, 2)).transpose(1, 2) for f in (s.k, s.v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=s.bias).transpose(1, 2).flatten(2)

    net = Net(forward, query=param(1, 2, 3, 2), k=nn.Linear(4, 4), v=nn.Linear(4, 4), bias=param(2, 3, 5))
    return net, torch.randn(b, 5, 4), None, wave


@case("attention")
def grouped_query_attention_with_rotations(b):
    def forward(s, x):
        q = s.q(x).unflatten(2, (4, 2)).transpose(1, 2)
        k, v = (f(x).unflatten(2, (2, 2)).transpose(1, 2) for f in (s.k, s.v))
        angle = torch.arange(x.shape[1])[:, None].to(x.dtype) * 0.3
        turn = torch.cat([angle.cos(), angle.sin()], 1)
        q, k = (torch.stack([h[..., 0] * turn[:, 0] - h[..., 1] * turn[:, 1], h.sum(-1)], -1) for h in (q, k))
        return s.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )

    net = Net(forward, q=nn.Linear(4, 8), k=nn.Linear(4, 4), v=nn.Linear(4, 4), out=nn.Linear(8, 4))
    return net, torch.randn(b, 5, 4), None, wave


@case("attention", "tied", "embedding")
def small_gpt(b):
    def forward(s, i):
        h = s.tokens(i) + s.positions(torch.arange(i.shape[1]))
        for block in s.blocks:
            q, k, v = block["qkv"](block["n1"](h)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            h = h + block["out"](
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            h = h + block["mlp"](block["n2"](h))
        return s.head(s.norm(h)).transpose(1, 2)

    def block():
        mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        parts = {
            "n1": nn.LayerNorm(4),
            "qkv": nn.Linear(4, 12),
            "out": nn.Linear(4, 4),
            "n2": nn.LayerNorm(4),
            "mlp": mlp,
        }
        return nn.ModuleDict(parts)

    net = Net(
        forward, tokens=nn.Embedding(7, 4), positions=nn.Embedding(8, 4),
        blocks=nn.ModuleList(block() for _ in range(2)), norm=nn.LayerNorm(4),
        head=nn.Linear(4, 7, bias=False),
    )  # fmt: skip
    net.head.weight = net.tokens.weight
    return net, ids(b, 5, 7), ids(b, 5, 6), F.cross_entropy


@case("attention", "conv")
def small_vision_transformer(b):
    def forward(s, x):
        h = s.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([s.token.expand(h.shape[0], -1, -1), h], 1) + s.positions
        return s.head(s.block(h)[:, 0])

    net = Net(
        forward, patch=nn.Conv2d(2, 4, 3, stride=3), token=param(1, 1, 4), positions=param(1, 5, 4),
        block=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), head=nn.Linear(4, 5),
    )  # fmt: skip
    return net, torch.randn(b, 2, 6, 6), labels(b), F.cross_entropy


@case("attention", "fold")
def shifted_windows_with_relative_positions(b):
    """Swin: rolled windows, a mask over windows, a bias looked up in a table of relative positions."""

    def forward(s, x):  # (B, 8, C), windows of 4
        h = x.roll(-2, 1).view(-1, 4, 4)
        q, k, v = s.qkv(h).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(4)
        bias = s.table[steps[:, None] - steps[None] + 3].permute(2, 0, 1)
        score = (q @ k.transpose(-1, -2) + bias).view(-1, 2, 2, 4, 4)
        mask = torch.zeros(2, 4, 4).masked_fill(torch.ones(2, 4, 4, dtype=torch.bool).tril(-3), -100.0)
        h = ((score + mask[:, None]).view(-1, 2, 4, 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + s.out(h).view(-1, 8, 4).roll(2, 1)

    net = Net(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4), table=param(7, 2))
    return net, torch.randn(b, 8, 4), None, wave


@case("attention")
def linear_attention(b):
    def forward(s, x):
        q, k, v = F.elu(s.q(x)) + 1, F.elu(s.k(x)) + 1, s.v(x)
        summary = torch.einsum("btc,btd->bcd", k, v)
        return torch.einsum("btc,bcd->btd", q, summary) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)

    return (
        Net(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4)),
        torch.randn(b, 5, 4),
        None,
        wave,
    )


@case("attention")
def squeeze_and_excitation(b):
    def forward(s, x):
        return x * torch.sigmoid(s.up(F.relu(s.down(F.adaptive_avg_pool2d(x, 1)))))

    return Net(forward, down=nn.Conv2d(4, 2, 1), up=nn.Conv2d(2, 4, 1)), torch.randn(b, 4, 3, 3), None, wave


@case("attention")
def encoder_in_eval_with_a_padding_mask(b):
    """torch's encoder asks whether the mask allows nested tensors, even where it will not use them."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    net = Net(
        lambda s, x, padding: s.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0),
        encoder=nn.TransformerEncoder(layer, 2).eval(),
    )
    padding = torch.arange(5) >= (5 - torch.arange(b) % 3)[:, None]
    return net, (torch.randn(b, 5, 8), padding), None, wave
