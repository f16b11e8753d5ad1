"""Embeddings, embedding bags, and tables of parameters that are indexed."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from cases.case import Net, case, ids, labels, param, wave


def reader(table, b, length=6, vocabulary=7):
    """Embed, squash, average over time, classify."""
    net = Net(lambda s, i: s.out(torch.tanh(s.table(i)).mean(1)), table=table, out=nn.Linear(4, 5))
    return net, ids(b, length, vocabulary), labels(b), F.cross_entropy


def bag_reader(bag, b, *more):
    net = Net(lambda s, *i: s.out(torch.tanh(s.bag(*i))), bag=bag, out=nn.Linear(4, 5))
    inputs = ids(b, 6, 7)
    return net, (inputs, *more) if more else inputs, labels(b), F.cross_entropy


@case("embedding")
def embedding(b):
    return reader(nn.Embedding(7, 4), b)


@case("embedding")
def embedding_with_padding(b):
    return reader(nn.Embedding(7, 4, padding_idx=0), b)


@case("embedding")
def embedding_of_one_id(b):
    net = nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 5))
    return net, ids(b, 1, 7)[:, 0], labels(b), F.cross_entropy


@case("embedding", "may_refuse")
def embedding_scaled_by_frequency(b):
    return reader(nn.Embedding(7, 4, scale_grad_by_freq=True), b)


@case("embedding", "may_refuse", "buffers")
def embedding_with_max_norm(b):
    return reader(nn.Embedding(7, 4, max_norm=1.0), b)


@case("embedding")
def embedding_with_sparse_gradient(b):
    return reader(nn.Embedding(7, 4, sparse=True), b)


@case("embedding")
def embedding_of_short_integers(b):
    model, x, y, loss = reader(nn.Embedding(7, 4), b)
    return model, x.int(), y, loss


@case("embedding")
def embedding_by_one_hot(b):
    net = Net(lambda s, i: torch.tanh(F.one_hot(i, 7).to(s.table.dtype) @ s.table), table=param(7, 4))
    return net, ids(b, 3, 7), None, wave


@case("embedding", "prelude")
def embedding_of_a_scaled_table(b):
    net = Net(lambda s, i: F.embedding(i, s.table * s.scale).tanh(), table=param(7, 4), scale=param(4))
    return net, ids(b, 3, 7), None, wave


@case("embedding")
def positions_without_a_batch_dimension(b):
    def forward(s, i):
        return s.out(torch.tanh(s.tokens(i) + s.positions(torch.arange(i.shape[1])[None]))).mean(1)

    net = Net(forward, tokens=nn.Embedding(7, 4), positions=nn.Embedding(8, 4), out=nn.Linear(4, 5))
    return net, ids(b, 6, 7), labels(b), F.cross_entropy


@case("embedding")
def three_embeddings_added(b):
    def forward(s, i, kind):
        return s.norm(s.tokens(i) + s.kinds(kind) + s.positions.weight[: i.shape[1]])

    net = Net(
        forward,
        tokens=nn.Embedding(7, 4),
        kinds=nn.Embedding(2, 4),
        positions=nn.Embedding(8, 4),
        norm=nn.LayerNorm(4),
    )
    return net, (ids(b, 6, 7), ids(b, 6, 2)), None, wave


@case("embedding", "bag")
def bag_sum(b):
    return bag_reader(nn.EmbeddingBag(7, 4, mode="sum"), b)


@case("embedding", "bag")
def bag_mean_with_padding(b):
    return bag_reader(nn.EmbeddingBag(7, 4, mode="mean", padding_idx=1), b)


@case("embedding", "bag")
def bag_max(b):
    return bag_reader(nn.EmbeddingBag(7, 4, mode="max"), b)


@case("embedding", "bag")
def bag_with_weights(b):
    def forward(s, i, w):
        return s.out(torch.tanh(s.bag(i, per_sample_weights=w)))

    net = Net(forward, bag=nn.EmbeddingBag(7, 4, mode="sum"), out=nn.Linear(4, 5))
    return net, (ids(b, 6, 7), torch.rand(b, 6)), labels(b), F.cross_entropy


@case("embedding", "bag", "fold")
def bag_with_offsets(b):
    def forward(s, i):
        offsets = torch.arange(i.shape[0]) * i.shape[1]
        return torch.tanh(s.bag(i.flatten(), offsets))

    return Net(forward, bag=nn.EmbeddingBag(7, 4, mode="sum")), ids(b, 6, 7), None, wave


@case("embedding", "bag", "may_refuse")
def bag_scaled_by_frequency(b):
    return bag_reader(nn.EmbeddingBag(7, 4, mode="sum", scale_grad_by_freq=True), b)


@case("embedding", "bag", "fold")
def bags_of_different_lengths_with_the_last_offset(b):
    """Two bags an example, of 2 and of 4 ids, then the end; padding and weights of the example's own."""

    def forward(s, i, w):
        starts = torch.arange(i.shape[0])[:, None] * i.shape[1] + torch.tensor([0, 2])
        offsets = torch.cat([starts.flatten(), torch.full((1,), i.shape[0] * i.shape[1])])
        bags = s.bag(i.flatten(), offsets, per_sample_weights=w.flatten())
        return torch.tanh(bags).view(i.shape[0], 2, -1)

    bag = nn.EmbeddingBag(7, 4, mode="sum", include_last_offset=True, padding_idx=1)
    return Net(forward, bag=bag), (ids(b, 6, 7), torch.rand(b, 6)), None, wave


@case("embedding", "bag", "fold")
def bag_mean_with_an_empty_bag(b):
    def forward(s, i):
        starts = torch.arange(i.shape[0])[:, None] * i.shape[1] + torch.tensor([0, 2, 2])
        return torch.tanh(s.bag(i.flatten(), starts.flatten())).view(i.shape[0], 3, -1)

    return Net(forward, bag=nn.EmbeddingBag(7, 4, mode="mean")), ids(b, 6, 7), None, wave


@case("embedding", "bag")
def bag_with_learned_weights(b):
    def forward(s, i):
        return s.out(torch.tanh(s.bag(i, per_sample_weights=s.scale[i])))

    net = Net(forward, bag=nn.EmbeddingBag(7, 4, mode="sum"), scale=param(7), out=nn.Linear(4, 5))
    return net, ids(b, 6, 7), labels(b), F.cross_entropy


@case("embedding", "index")
def table_by_take(b):
    return Net(lambda s, i: torch.tanh(s.table.take(i - 7)), table=param(2, 7)), ids(b, 6, 7), None, wave


@case("embedding", "index")
def table_indexed_by_pairs(b):
    """A relative position table: one entry for a difference of rows and one of columns."""

    def forward(s, i, j):
        d, e = (k[:, :, None] - k[:, None, :] for k in (i, j))
        return torch.tanh(s.table[d, e] + s.heads[:, d, e].movedim(0, -1))

    return (
        Net(forward, table=param(13, 9, 2), heads=param(2, 13, 9)),
        (ids(b, 4, 7), ids(b, 4, 5)),
        None,
        wave,
    )


@case("embedding", "index")
def table_indexed_by_ids(b):
    return Net(lambda s, i: torch.tanh(s.table[i]), table=param(7, 4)), ids(b, 6, 7), None, wave


@case("embedding", "index")
def table_indexed_along_its_second_dimension(b):
    return (
        Net(lambda s, i: torch.tanh(s.table[:, i]).movedim(1, 0), table=param(4, 7)),
        ids(b, 6, 7),
        None,
        wave,
    )


@case("embedding", "index", "fold")
def table_by_index_select(b):
    def forward(s, i):
        return torch.tanh(s.table.index_select(0, i.flatten()).view(*i.shape, -1))

    return Net(forward, table=param(7, 4)), ids(b, 6, 7), None, wave


@case("embedding", "index")
def table_by_gather(b):
    def forward(s, i):
        return torch.tanh(s.table.expand(i.shape[0], -1, -1).gather(1, i[..., None].expand(-1, -1, 4)))

    return Net(forward, table=param(7, 4)), ids(b, 6, 7), None, wave


@case("embedding", "index")
def table_of_pairs(b):
    """A relative position table: one entry for every difference of two coordinates of the example."""

    def forward(s, i):
        return torch.tanh(
            s.table[:, i[:, :, None] - i[:, None, :] + 6].transpose(0, 1) + s.bias[:, None, None]
        )

    return Net(forward, table=param(2, 13), bias=param(2)), ids(b, 4, 7), None, wave


@case("embedding", "index", "prelude")
def relative_position_bias_of_a_fixed_grid(b):
    def forward(s, x):
        steps = torch.arange(x.shape[1])
        bias = s.table[steps[:, None] - steps[None] + x.shape[1] - 1].permute(2, 0, 1)
        return torch.softmax((x @ x.transpose(1, 2))[:, None] + bias, -1)

    return Net(forward, table=param(9, 2)), torch.randn(b, 5, 3), None, wave


@case("embedding", "index")
def table_taken_along_a_dimension(b):
    """Ids below zero count from the end, where this torch takes them."""
    try:
        torch.take_along_dim(torch.zeros(7), torch.tensor([-7]), 0)
    except RuntimeError:
        end = 0
    else:
        end = 7

    def forward(s, i):
        taken = torch.take_along_dim(s.table[None], i - end, 1)
        some = torch.take_along_dim(taken, torch.tensor([[-1 if end else 5, 0, 1]]), 1)
        return torch.tanh(taken) * some.sum(1, keepdim=True)

    return Net(forward, table=param(7)), ids(b, 6, 7), None, wave
