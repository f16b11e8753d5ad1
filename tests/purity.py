"""What a call must leave as it was: the module, its hooks, its `.grad`, the inputs, the random numbers."""

from __future__ import annotations

import torch
from oracle import tensors
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


def snapshot(model, *trees):
    """Everything that can be compared before and after a call, by name."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "objects": {name: id(t) for name, t in state.items()},
        "values": {name: t.detach().clone() for name, t in state.items()},
        "inputs": [t.detach().clone() for t in tensors(trees)],
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "flags": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: m.training for name, m in model.named_modules()},
        "hooks": {name: hooks(m) for name, m in model.named_modules()},
        "random": torch.get_rng_state(),
    }


def hooks(module):
    return {
        name: list(value)
        for name, value in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs"))
    }


def assert_unchanged(before, after):
    for what, old in before.items():
        torch.testing.assert_close(
            after[what], old, rtol=0, atol=0, equal_nan=True, msg=lambda m, what=what: f"{what}: {m}"
        )


def assert_no_fakes(model):
    """No tensor of the trace is left in an attribute of a module."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            assert not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)), (
                f"{name}.{key} holds a fake tensor"
            )
