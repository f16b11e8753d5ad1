"""Recurrent layers with every option, cells in loops, and recurrences written by hand."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from cases.case import Net, case, ids, labels, param, wave


def recurrent(layer, b, features=3):
    """The layer alone, its batch first: every output element enters the loss."""

    def forward(s, x):
        if s.rnn.batch_first:
            return s.rnn(x)[0]
        return s.rnn(x.transpose(0, 1))[0].transpose(0, 1)

    return Net(forward, rnn=layer), torch.randn(b, 3, features), None, wave


@case("recurrent")
def rnn(b):
    return recurrent(nn.RNN(3, 4, batch_first=True), b)


@case("recurrent")
def rnn_relu_two_layers_time_major(b):
    return recurrent(nn.RNN(3, 4, 2, nonlinearity="relu"), b)


@case("recurrent")
def lstm(b):
    net = Net(
        lambda s, x: s.out(s.rnn(x)[0][:, -1]), rnn=nn.LSTM(3, 4, batch_first=True), out=nn.Linear(4, 5)
    )
    return net, torch.randn(b, 3, 3), labels(b), F.cross_entropy


@case("recurrent")
def lstm_time_major_two_layers_bidirectional(b):
    return recurrent(nn.LSTM(3, 4, 2, bidirectional=True), b)


@case("recurrent")
def lstm_with_projection(b):
    return recurrent(nn.LSTM(3, 4, proj_size=2, batch_first=True), b)


@case("recurrent")
def lstm_without_bias(b):
    return recurrent(nn.LSTM(3, 4, bias=False, batch_first=True), b)


@case("recurrent")
def gru(b):
    return recurrent(nn.GRU(3, 4, batch_first=True), b)


@case("recurrent")
def gru_time_major_two_layers_bidirectional_without_bias(b):
    return recurrent(nn.GRU(3, 4, 2, bias=False, bidirectional=True), b)


@case("recurrent")
def lstm_with_a_given_state(b):
    def forward(s, x, h, c):
        out, (hn, cn) = s.rnn(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return torch.cat([out.flatten(1), hn.transpose(0, 1).flatten(1), cn.transpose(0, 1).flatten(1)], 1)

    net = Net(forward, rnn=nn.LSTM(3, 4, 2, batch_first=True))
    return net, (torch.randn(b, 3, 3), torch.randn(b, 2, 4), torch.randn(b, 2, 4)), None, wave


@case("recurrent")
def gru_with_a_learned_state(b):
    def forward(s, x):
        return s.rnn(x, s.state.expand(-1, x.shape[0], -1).contiguous())[1][0]

    return (
        Net(forward, rnn=nn.GRU(3, 4, batch_first=True), state=param(1, 1, 4)),
        torch.randn(b, 3, 3),
        None,
        wave,
    )


@case("recurrent", "output")
def lstm_returning_output_and_states(b):
    net = nn.LSTM(3, 4, batch_first=True)
    return (
        net,
        torch.randn(b, 3, 3),
        None,
        lambda o, y: wave(o[0]) + wave(o[1][0].transpose(0, 1)) + wave(o[1][1][0]),
    )


@case("recurrent", "embedding")
def language_model(b):
    def forward(s, i):
        return s.head(s.rnn(s.emb(i))[0]).transpose(1, 2)

    net = Net(forward, emb=nn.Embedding(7, 4), rnn=nn.GRU(4, 4, batch_first=True), head=nn.Linear(4, 7))
    return net, ids(b, 4, 7), ids(b, 4, 5), F.cross_entropy


@case("recurrent", "may_refuse")
def packed_sequences(b):
    def forward(s, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(s.rnn(packed)[0], batch_first=True, total_length=4)[0]

    return (
        Net(forward, rnn=nn.LSTM(3, 4, batch_first=True)),
        (torch.randn(b, 4, 3), torch.arange(b) % 4 + 1),
        None,
        wave,
    )


def cells(cell, step, b, state):
    def forward(s, x):
        h, hs = state(x), []
        for t in range(x.shape[1]):
            h = step(s.cell, x[:, t], h)
            hs.append(h[0] if isinstance(h, tuple) else h)
        return torch.stack(hs, 1)

    return Net(forward, cell=cell), torch.randn(b, 2, 3), None, wave


@case("recurrent")
def rnn_cell_in_a_loop(b):
    return cells(nn.RNNCell(3, 4), lambda cell, x, h: cell(x, h), b, lambda x: x.new_zeros(x.shape[0], 4))


@case("recurrent")
def gru_cell_in_a_loop(b):
    return cells(nn.GRUCell(3, 4), lambda cell, x, h: cell(x, h), b, lambda x: torch.zeros(x.size(0), 4))


@case("recurrent")
def lstm_cell_in_a_loop(b):
    return cells(nn.LSTMCell(3, 4), lambda cell, x, h: cell(x, h), b, lambda x: None)


@case("recurrent", "tied")
def recurrence_by_hand(b):
    def forward(s, x):
        h = s.start
        for token in x.unbind(1):
            h = torch.tanh(s.inner(token) + s.state(h))
        return s.out(h)

    net = Net(
        forward, inner=nn.Linear(3, 4), state=nn.Linear(4, 4, bias=False), out=nn.Linear(4, 5), start=param(4)
    )
    return net, torch.randn(b, 3, 3), labels(b), F.cross_entropy


@case("recurrent", "tied", "conv")
def convolutional_recurrence(b):
    def forward(s, x):
        h = x.new_zeros(x.shape[0], 3, *x.shape[3:])
        for t in range(x.shape[1]):
            update, candidate = s.conv(torch.cat([x[:, t], h], 1)).chunk(2, 1)
            h = torch.lerp(h, candidate.tanh(), update.sigmoid())
        return h

    return Net(forward, conv=nn.Conv2d(5, 6, 3, padding=1)), torch.randn(b, 3, 2, 4, 3), None, wave


@case("recurrent", "tied")
def fixed_point_by_iteration(b):
    def forward(s, x):
        z = torch.zeros_like(x)
        for _ in range(4):
            z = torch.tanh(0.5 * s.lin(z) + x)
        return z

    return Net(forward, lin=nn.Linear(4, 4)), torch.randn(b, 4), None, wave
