"""Operations that are traced as the simpler ones they are made of, so that their rules apply.

Recurrent layers become their linear maps and gates, step by step; the uses of one weight over time
are joined again into one factor afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.functional import linear

aten = torch.ops.aten


def _gates(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> Tensor:
    return linear(x, w_ih, b_ih) + linear(h, w_hh, b_hh)


def lstm_cell(x: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    """i, f, g, o = gates; c' = f c + i g; h' = o tanh(c')."""
    h, c = hx
    i, f, g, o = _gates(x, h, w_ih, w_hh, b_ih, b_hh).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    """r, z, n = gates; h' = n + z (h - n), where r scales the hidden part of n."""
    xr, xz, xn = linear(x, w_ih, b_ih).chunk(3, -1)
    hr, hz, hn = linear(h, w_hh, b_hh).chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + (xz + hz).sigmoid() * (h - n)


def rnn_tanh_cell(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    """h' = tanh(gates)."""
    return _gates(x, h, w_ih, w_hh, b_ih, b_hh).tanh()


def rnn_relu_cell(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    """h' = relu(gates)."""
    return _gates(x, h, w_ih, w_hh, b_ih, b_hh).relu()


DECOMPOSITIONS = {
    **get_decompositions([aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input]),
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.rnn_tanh_cell.default: rnn_tanh_cell,
    aten.rnn_relu_cell.default: rnn_relu_cell,
}
