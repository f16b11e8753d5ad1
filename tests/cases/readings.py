"""Python code that reads numbers from tensors, and copies of parameters that examples share."""

from __future__ import annotations

import math

import torch
import torch.nn as nn

from cases.case import Net, case, ids, param, wave


def masked(forward, b, mask=None, **members):
    """A linear layer on (B, 3, 4) with an integer mask (B, 3)."""
    x = torch.randn(b, 3, 4)
    mask = torch.ones(b, 3, dtype=torch.long) if mask is None else mask
    return Net(forward, lin=nn.Linear(4, 5), **members), (x, mask), None, wave


@case("readings")
def mask_left_out_where_it_hides_nothing(b):
    def forward(s, x, mask):
        h = s.lin(x)
        return h if mask.all() else h * mask[..., None]

    return masked(forward, b)


@case("readings")
def mask_that_the_model_fills_itself(b):
    def forward(s, x):
        mask = torch.zeros_like(x[..., 0])
        mask[:, 0] = 1
        ones = x.new_ones(x.shape[:2])
        h = s.lin(x * mask[..., None]) if mask.sum(1).max().item() == 1 else s.lin(x)
        return h if ones.all() else h * ones

    return Net(forward, lin=nn.Linear(4, 5)), torch.randn(b, 3, 4), None, wave


@case("readings")
def lengths_that_are_checked(b):
    def forward(s, i):
        lengths = (i != 9).sum(1)
        assert lengths.max().item() <= i.shape[1]
        return s.table(i).tanh()

    return Net(forward, table=nn.Embedding(7, 4)), ids(b, 5, 7), None, wave


@case("readings")
def steps_that_every_example_takes(b):
    def forward(s, x, mask):
        h = x
        for _ in range(int(mask.sum(1).max())):
            h = torch.tanh(s.square(h))
        return s.lin(h) * mask.max().item()

    return masked(forward, b, square=nn.Linear(4, 4))


@case("readings", "buffers")
def switch_kept_in_a_buffer(b):
    model, x, y, loss = masked(lambda s, x, mask: s.lin(x) if s.on else s.lin(-x), b)
    model.register_buffer("on", torch.tensor(1))
    return model, x, y, loss


@case("readings", "buffers")
def numbers_of_floating_buffers(b):
    def forward(s, x):
        h = s.lin(x) * float(s.scale) / math.sqrt(s.scale)
        for _ in range(int(s.steps)):
            h = h.tanh()
        return h

    model = Net(forward, lin=nn.Linear(4, 5))
    model.register_buffer("scale", torch.tensor(1.7))
    model.register_buffer("steps", torch.tensor(2.0))
    return model, torch.randn(b, 4), None, wave


@case("refused", "naive", match=r"(?is)differs between the examples.*naive")
def mask_that_hides_in_one_example_only(b):
    mask = torch.ones(b, 3, dtype=torch.long)
    mask[0, 1:] = 0

    def forward(s, x, mask):
        return s.lin(x) if mask.all() else s.lin(x * mask[..., None])

    return masked(forward, b, mask)


@case("refused", "naive", match=r"(?is)reads a number from activations.*naive")
def branch_on_an_activation_of_ids(b):
    def forward(s, i):
        h = s.table(i)
        return h.tanh() if h.abs().sum() > 0 else h

    return Net(forward, table=nn.Embedding(7, 4)), ids(b, 5, 7), None, wave


# --- copies of parameters, one for each example ---------------------------------------------------


@case("copies", "fold")
def class_token_taken_from_another_example(b):
    """As TimeSformer does: of (B*T) copies of a token the first B are used, which is not one of each example."""

    def forward(s, x):
        h = s.lin(x).flatten(0, 1)
        tokens = s.token.expand(h.shape[0], -1) + s.position
        return h.unflatten(0, (x.shape[0], -1)).tanh() + tokens[: x.shape[0], None]

    net = Net(forward, lin=nn.Linear(4, 5), token=param(5), position=param(5))
    return net, torch.randn(b, 3, 4), None, wave


@case("copies")
def copies_rolled_along_the_batch(b):
    def forward(s, x):
        return s.lin(x).tanh() + s.token.expand(x.shape[0], 3, 5).roll(1, 0)

    return Net(forward, lin=nn.Linear(4, 5), token=param(5)), torch.randn(b, 3, 4), None, wave


@case("refused", match=r"(?is)mix.*size of the batch")
def copies_added_up_in_the_gradient_only(b):
    def forward(s, x):
        copies = s.token.expand(x.shape[0], 5)
        return s.lin(x).tanh() + copies + copies.sum(0) - copies.sum(0).detach()

    return Net(forward, lin=nn.Linear(4, 5), token=param(5)), torch.randn(b, 4), None, wave
