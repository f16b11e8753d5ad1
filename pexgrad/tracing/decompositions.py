"""Operations that are traced as the simpler ones they are made of, so that their rules apply.

Recurrent layers become their linear maps and gates, step by step; the uses of one weight over time are joined again into
one factor afterwards. Shapes: x (t, b, i), a state (b, h), gates (b, n h) with n = 4 for LSTM, 3 for GRU, 1 for RNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..base.source import calling_line
from ..errors import ANY_MODEL, TraceError
from .contractions import CONTRACTIONS
from .lookups import LOOKUPS
from .quantised import QUANTISED
from .squeezes import SQUEEZES
from .unrolled import over_time

aten = torch.ops.aten

# (input's part of the gates, state, w_hh, b_hh) -> state, of which the first tensor is the step's output
Step = Callable[[Tensor, tuple[Tensor, ...], Tensor, Any], tuple[Tensor, ...]]


def lstm_step(xs: Tensor, state: tuple[Tensor, ...], w_hh: Tensor, b_hh: Any) -> tuple[Tensor, ...]:
    """i, f, g, o = gates; c' = f c + i g; h' = o tanh(c')."""
    h, c = state
    i, f, g, o = (xs + linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(xs: Tensor, state: tuple[Tensor, ...], w_hh: Tensor, b_hh: Any) -> tuple[Tensor, ...]:
    """r, z, n = gates; h' = n + z (h - n), where r scales the hidden part of n."""
    (h,) = state
    xr, xz, xn = xs.chunk(3, -1)
    hr, hz, hn = linear(h, w_hh, b_hh).chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return (n + (xz + hz).sigmoid() * (h - n),)


def tanh_step(xs: Tensor, state: tuple[Tensor, ...], w_hh: Tensor, b_hh: Any) -> tuple[Tensor, ...]:
    """h' = tanh(gates)."""
    return ((xs + linear(state[0], w_hh, b_hh)).tanh(),)


def relu_step(xs: Tensor, state: tuple[Tensor, ...], w_hh: Tensor, b_hh: Any) -> tuple[Tensor, ...]:
    """h' = relu(gates)."""
    return ((xs + linear(state[0], w_hh, b_hh)).relu(),)


def _direction(
    step: Step,
    x: Tensor,
    state: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    has_biases: bool,
    *,
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: its outputs (t, b, h) and its last state."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    project = rest[2:] if has_biases else rest  # an LSTM's projection of its output

    def projected(part: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, *others = step(part, state, w_hh, b_hh)
        return linear(h, project[0]) if project else h, *others

    return over_time(projected, linear(x, w_ih, b_ih), state, reverse=reverse)


def _recurrent(
    step: Step, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All layers: the outputs, then each kind of state, stacked over layers and directions."""
    x = x.transpose(0, 1) if batch_first else x
    runs = num_layers * (2 if bidirectional else 1)
    size = len(params) // runs
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for reverse in (False, True) if bidirectional else (False,):
            k = len(last)
            start = tuple(s[k] for s in states)
            out, state = _direction(
                step, x, start, params[k * size : (k + 1) * size], has_biases, reverse=reverse
            )
            outputs.append(out)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(kind) for kind in zip(*last, strict=True))


def _layers(step: Step) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, states, *args: _recurrent(step, x, _several(states), *args)


def _several(states: Any) -> tuple[Tensor, ...]:
    return (states,) if isinstance(states, Tensor) else tuple(states)


def _cell(step: Step) -> Callable[..., Any]:
    def cell(x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = step(linear(x, w_ih, b_ih), _several(hx), w_hh, b_hh)
        return state if len(state) > 1 else state[0]  # pyright: ignore[reportGeneralTypeIssues]

    return cell


def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`gather` on operands broadcast to one another, all but `dim`; torch's own fixes every size."""
    if dim is None:
        return x.flatten().gather(0, indices.flatten() % x.numel())
    dim %= x.dim()
    indices = indices % x.shape[dim]  # as torch's own does

    def larger(n: Any, m: Any) -> Any:  # without a guard on the batch size
        return m if isinstance(n, int) and n == 1 else n

    shared = [larger(n, m) for n, m in zip(x.shape, indices.shape, strict=True)]

    def expanded(t: Tensor) -> Tensor:
        return t.expand([t.shape[dim] if i == dim else n for i, n in enumerate(shared)])

    return expanded(x).gather(dim, expanded(indices))


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """w = g v / |v|; torch's fused kernel takes |v| for a constant in its second derivative."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def refuse_packing(*_: Any) -> Any:
    """`pack_padded_sequence` lays sequences out by their lengths, which are data."""
    raise TraceError(
        f"a packed sequence (at {calling_line()}) is laid out by the lengths of all examples, which no graph can follow; run the "
        f"recurrent layer on the padded batch and read each example's output at its length (gather), or {ANY_MODEL}"
    )


DECOMPOSITIONS = {
    aten.lstm.input: _layers(lstm_step),
    aten.gru.input: _layers(gru_step),
    aten.rnn_tanh.input: _layers(tanh_step),
    aten.rnn_relu.input: _layers(relu_step),
    aten.lstm_cell.default: _cell(lstm_step),
    aten.gru_cell.default: _cell(gru_step),
    aten.rnn_tanh_cell.default: _cell(tanh_step),
    aten.rnn_relu_cell.default: _cell(relu_step),
    aten.take_along_dim.default: take_along_dim,
    aten._weight_norm.default: weight_norm,
    aten._pack_padded_sequence.default: refuse_packing,
    **LOOKUPS,
    **CONTRACTIONS,
    **QUANTISED,
    **SQUEEZES,
}
