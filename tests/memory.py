"""What a call allocates: every tensor that an operation makes while a dispatch mode watches, backward passes included."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Bytes of the storages that are made inside: the `largest` one, and the `peak` of those alive together.

    >>> with Allocations() as seen:
    ...     fn(params, x, y)
    >>> seen.largest, seen.peak

    Workspaces inside kernels are not seen; storages that were there before are not counted.
    """

    def __init__(self):
        super().__init__()
        self.largest = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._forget()
        for storage in _storages((args, kwargs)):
            self._alive.setdefault(
                storage._cdata, (StorageWeakRef(storage), 0)
            )  # made elsewhere: not counted
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result

    def _forget(self):
        """Drop what is freed, before its address is given to another."""
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            del self._alive[key]


def _storages(tree):
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def allocations(call):
    """The `Allocations` of a second `call()`: the first one traces, and verifies with rows."""
    call()
    with Allocations() as seen:
        call()
    return seen
