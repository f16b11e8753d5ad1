"""Fake tensors made from others directly, in a fraction of the steps that torch takes to the same.

In a file of their own: a question about the batch size is taken for one of metadata, on which no graph depends, by the file
that it is asked from (see `fakes.computes_metadata`).
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager, unset_fake_temporarily


def is_plain(x: Any) -> TypeGuard[FakeTensor]:
    """Whether its numbers lie one after the other; that a batch of one may be told another thing matters to no result."""
    return isinstance(x, FakeTensor) and x.layout is torch.strided and x.is_contiguous()


def new_like(x: FakeTensor, shape: Any) -> FakeTensor:
    """`x.new_empty(shape)`."""
    with unset_fake_temporarily():
        meta = torch.empty(shape, dtype=x.dtype, device="meta")
    return FakeTensor(x.fake_mode, meta, x.device)


def seen_as(x: FakeTensor, shape: Any) -> FakeTensor:
    """`x.view(shape)` of what is contiguous."""
    with in_kernel_invocation_manager(x.fake_mode):
        meta = x.as_strided(shape, make_contiguous_strides_for(shape))
    return FakeTensor(x.fake_mode, meta, x.device)
