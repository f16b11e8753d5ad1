"""Histories: what users do to a model between calls of transforms that live on, in any order, against the loop."""

from __future__ import annotations

import copy
import enum
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from oracle import assert_rows_equal, norms_of, rows_of
from purity import assert_unchanged, snapshot
from test_repeats import soon as soon  # a fixture: a graph answers from the third call on
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import pexgrad

pytestmark = pytest.mark.usefixtures("double")

Kind = enum.Enum("Kind", "SMOOTH SHARP")


class Table(dict):
    """A dict that may have attributes."""

    gain = 1.0


class Model(nn.Module):
    """Layers and settings of every kind; a plain one, without tensors beside parameters, may be answered by a graph."""

    kind = Kind.SMOOTH

    def __init__(self, plain=False):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), nn.Linear(4, 3)
        self.blocks[2].weight = self.blocks[0].weight
        self.register_module("pre", nn.Tanh())
        self.register_module("post", None)
        self.slope, self.table, self.factors, self.counted = 0.1, Table(a=1.0), [1, 2], torch.ones(2)
        self.scale, self.shifts = (1.2, [0.1]) if plain else (torch.tensor(1.2), [torch.tensor(0.1)])
        self.register_buffer("level", None if plain else torch.tensor(1))

    def forward(self, x):
        h = x if self.pre is None else self.pre(x)
        for block in self.blocks:
            h = h + F.leaky_relu(block(h), self.slope)
        h = h * self.scale * self.table["a"] * self.table.gain * len(self.counted)
        h = sum((h * n for n in self.factors), sum(self.shifts))
        h = h.tanh() if self.kind is Kind.SMOOTH else h.relu()
        if self.level is not None and self.level > 1:
            h = h.sigmoid()
        return self.head(h if self.post is None else self.post(h))


def doubled(module, args, output):
    return 2 * output


def state(m):
    m.load_state_dict({k: 1.1 * v if v.is_floating_point() else v + 1 for k, v in m.state_dict().items()})


def step(m):
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(m.parameters(), lr=0.05).step()


def before(module, args, kwargs=None):
    return (2 * args[0],) if kwargs is None else ((3 * args[0],), kwargs)


def with_keywords(m):
    m.head._forward_pre_hooks.clear()
    m.head.register_forward_pre_hook(before, with_kwargs=True)


CHANGES = {f.__name__: f for f in (state, step, with_keywords)} | {
    "hook": lambda m: m.head.register_forward_hook(doubled),
    "no hooks": lambda m: m.head._forward_hooks.clear(),
    "parametrization": lambda m: parametrize.register_parametrization(m.head, "weight", nn.Tanh()),
    "number": lambda m: setattr(m, "slope", 0.7 - m.slope),
    "item of a list": lambda m: m.factors.append(m.factors.pop() + 1),
    "item of a dict": lambda m: m.table.update(a=1.5),
    "number or tensor": lambda m: setattr(m, "scale", 1.1 * m.scale),
    "buffer": lambda m: m.level is None or m.level.add_(1),
    "frozen": lambda m: m.blocks[1].bias.requires_grad_(not m.blocks[1].bias.requires_grad),
    "another submodule": lambda m: setattr(m, "head", nn.Linear(4, 3)),
    "untied": lambda m: setattr(m.blocks[2], "weight", nn.Parameter(torch.ones(4, 4))),
    "strides": lambda m: setattr(m.blocks[1].weight, "data", m.blocks[1].weight.data.T.contiguous().T),
    "training": lambda m: m.train(not m.training),
    "pre-hook": lambda m: m.head.register_forward_pre_hook(before),
    "block once more": lambda m: m.blocks.append(m.blocks[0]),
    "tied to another": lambda m: setattr(m.blocks[2], "weight", m.blocks[1].weight),
    "submodule elsewhere": lambda m: vars(m)["_modules"].update(pre=m.post, post=m.pre),
    "one tensor more": lambda m: m.shifts.append(torch.tensor(0.3)),
    "shape of a tensor": lambda m: setattr(m, "counted", torch.ones(len(m.counted) + 1)),
    "attribute of a dict": lambda m: setattr(m.table, "gain", m.table.gain + 0.5),
    "enum of a class": lambda m: setattr(Model, "kind", Kind.SHARP if m.kind is Kind.SMOOTH else Kind.SMOOTH),
}
TRANSFORMS = {
    "rows": (pexgrad.per_example_grad, {}),
    "chunks": (pexgrad.per_example_grad, {"chunk_size": 2, "create_graph": True, "verify": False}),
    "loop": (pexgrad.per_example_grad, {"strategy": "naive"}),
    "norm": (pexgrad.per_example_grad_norm, {"verify": False}),
    "clipped": (pexgrad.clipped_grad, {"max_norm": 0.3, "verify": False}),
}
GIVEN = {
    "own": dict,
    "other values": lambda own: {k: 1.1 * p.detach() for k, p in own.items()},
    "some": lambda own: {k: own[k] for k in list(own)[::-2]},
}


def check(name, fn, model, loss, params, x):
    """What a call gives is right, and the call changes nothing; given parameters are those of a copy of the model."""
    y, copied = torch.arange(len(x)) % 3, copy.deepcopy(model)
    for k, p in params.items():
        copied.get_parameter(k).data = p.detach().clone()
    rows = rows_of(copied, loss, x, y)
    rows, before = {k: rows[k] for k in params if k in rows}, snapshot(model, params, x, y)
    got = result = fn(params, x, y)
    assert_unchanged(before, snapshot(model, params, x, y))
    if name == "norm":
        got, rows = {"norm": got}, {"norm": norms_of(rows)}
    if name == "clipped":
        weights = (0.3 / norms_of(rows)).clamp(max=1)
        got, rows = got.grads, {k: torch.tensordot(weights, r, 1) for k, r in rows.items()}
    assert_rows_equal(got, rows, 1e-8)
    return result


class Histories(RuleBasedStateMachine):
    @initialize(plain=st.booleans())
    def begin(self, plain):
        torch.manual_seed(0)
        self.model, self.loss = Model(plain), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
        self.fns = {n: make(self.model, self.loss, **options) for n, (make, options) in TRANSFORMS.items()}

    @rule(name=st.sampled_from(sorted(TRANSFORMS)), given=st.sampled_from(sorted(GIVEN)), batch=st.integers(0, 3),
          times=st.sampled_from([1, 4]), in_columns=st.booleans())  # fmt: skip
    def call(self, name, given, batch, times, in_columns):
        x = torch.randn(4, batch).T if in_columns else torch.randn(batch, 4)
        for _ in range(times):
            params = GIVEN[given](dict(self.model.named_parameters()))
            for t in tree_leaves(check(name, self.fns[name], self.model, self.loss, params, x)):
                t.detach().fill_(7.0)  # which is nothing to the calls that follow

    @rule(name=st.sampled_from(sorted(CHANGES)))
    def change(self, name):
        CHANGES[name](self.model)

    @rule()
    def change_the_loss(self):
        self.loss.label_smoothing = 0.2 - self.loss.label_smoothing
        self.loss.weight.mul_(torch.tensor([1.0, 1.1, 0.9]))

    @rule(name=st.sampled_from(["rows", "loop"]))
    def call_in_vain(self, name):
        params, x, y = dict(self.model.named_parameters()), torch.randn(3, 5), torch.tensor([0, 1, 2])
        before = snapshot(self.model, x, y)
        with pytest.raises(RuntimeError):
            self.fns[name](params, x, y)
        assert_unchanged(before, snapshot(self.model, x, y))

    @rule()
    def go_on_with_a_copy(self):
        """Of the model and its transforms together; torch pickles no parametrizations."""
        every = self.model, self.loss, self.fns
        whole = parametrize.is_parametrized(self.model.head)
        self.model, self.loss, self.fns = copy.deepcopy(every) if whole else pickle.loads(pickle.dumps(every))


def test_histories():
    bounded = settings(max_examples=10, stateful_step_count=15, deadline=None, derandomize=True)
    run_state_machine_as_test(Histories, settings=bounded)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name):
    # one that reads numbers is looked at more closely
    model, loss, x = Model(plain=name != "buffer"), nn.CrossEntropyLoss(), torch.randn(3, 4)
    fn = pexgrad.per_example_grad(model, loss, verify=False)
    check("rows", fn, model, loss, dict(model.named_parameters()), x)
    CHANGES[name](model)
    check("rows", fn, model, loss, dict(model.named_parameters()), x)
