"""A function of one set of parameters and one batch, over more of either: ensembles, chunks, loaders.

They take what the transforms return, and any function `(params, x, y) -> tree of tensors` like them, a lowered or a
compiled graph included. Parts of a batch are put together again by the meaning of the result: what has a row for each
example is concatenated, a clipped sum is added up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .base import nested, trees
from .base.checks import one_of, positive_int
from .calls.loaders import Unpack, pairs
from .calls.members import run_members
from .calls.results import check_joinable, join
from .calls.transform import Transform
from .calls.transforms import PerExampleGrad, PerExampleValueAndGrad
from .errors import InputError

Function = Callable[..., Any]
_WAYS = ("auto", "together", "one by one")
# bytes of the rows of all members, up to which they run together: a loop takes the memory of one member at a time
TOGETHER = 1 << 29
ENTRIES = "params must map names to tensors with the members on dimension 0"


def stack_params(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters of models of one architecture, stacked: name -> (M, *shape).

    >>> stacked = stack_params([torch.nn.Linear(3, 2) for _ in range(4)])
    >>> stacked["weight"].shape
    torch.Size([4, 2, 3])

    Raises:
        InputError: where the models have different parameters, or different buffers (which are not stacked).
    """
    if not models:
        raise InputError("stack_params needs at least one model")
    first = dict(models[0].named_parameters())
    every = [dict(m.named_parameters()) for m in models]
    for i, own in enumerate(every):
        if {k: p.shape for k, p in own.items()} != {k: p.shape for k, p in first.items()}:
            raise InputError(
                f"model {i} has other parameters than model 0; an ensemble needs models of one architecture"
            )
        _check_buffers(models[0], models[i], i)
    return {k: torch.stack([own[k].detach() for own in every]) for k in first}


def _check_buffers(first: nn.Module, other: nn.Module, i: int) -> None:
    theirs = dict(other.named_buffers())
    for k, b in first.named_buffers():
        if k not in theirs or not torch.equal(b, theirs[k]):
            raise InputError(
                f"buffer '{k}' of model {i} differs from model 0's, and a transform uses the buffers of its own model; "
                "make them equal, or call the members' own functions one by one"
            )


def ensemble(fn: Function, *, stacked_data: bool = False, how: str = "auto") -> Function:
    """`fn` over stacked parameters: `(stacked, x, y) -> fn's result with the M members on dimension 0`.

    >>> grads = ensemble(per_example_grad(model))(stack_params(models), x, y)
    >>> grads["weight"].shape
    torch.Size([4, 5, 2, 3])

    The members run together, as one run of the flat graph (`fn.lower`) in which each operation is one call for all of them.
    Where the rows of all members would take more than 512 MiB, where the call has no flat graph, where `fn` has other
    options than `verify`, or where it draws random numbers, they are called one by one on slices of the parameters that are
    not copies, rows being written straight into the stacked result.
    Measured on one CPU core in float32, milliseconds one by one / together / `torch.func.vmap(fn, (0, None, None))`:

    | 20 members | rows | norms | clipped sums |
    |---|---|---|---|
    | MLP 20-32-10, B = 16 | 12 / 2.2 / 1.3 | 13 / 3.3 / 1.3 | 20 / 5.0 / 1.8 |
    | MLP 784-128-10, B = 64 | 218 / 201 / 201 | 20 / 6.3 / 4.3 | 30 / 9.9 / 5.9 |

    Args:
        fn: a transform, or a function like one.
        stacked_data: whether x and y are stacked too, (M, B, ...), for each member its own.
        how: `"auto"`, or which of the two to use: `"together"`, `"one by one"`.

    Raises:
        InputError: where the members cannot be counted.
        PexgradError: with `how="together"`, where the call has no flat graph.
    """
    one_of(how, _WAYS, "how")

    def over_members(params: Mapping[str, Any], x: Any, y: Any = None) -> Any:
        members = _members(params)

        if stacked_data and {*(t.shape[:1] for t in trees.tensors((trees.as_call(x), y)))} != {(members,)}:
            raise InputError(
                f"with stacked_data every tensor of x and y needs the {members} members on dimension 0"
            )

        def arguments(i: int) -> tuple[Any, Any, Any]:
            data = (trees.map_tensors(lambda t: t[i], tree) if stacked_data else tree for tree in (x, y))
            return (_select(params, i), *data)

        if how != "one by one" and isinstance(fn, Transform):
            most = TOGETHER // members if how == "auto" else None
            together = run_members(fn, params, x, y, members, stacked_data, most)
            if together is not None:
                return together
        elif how == "together":
            raise InputError(f"{type(fn).__name__} is no transform of pexgrad, and has no flat graph")
        if isinstance(fn, PerExampleGrad) and not fn._options.create_graph and not nested.is_nested(params):
            return _into_one(fn, members, arguments)
        results = [fn(*arguments(i)) for i in range(members)]
        check_joinable(results, 0)
        return pytree.tree_map(lambda *parts: torch.stack(parts), *results)

    return over_members


def _members(params: Mapping[str, Any]) -> int:
    tensors = (
        [t for t in nested.flatten(params).values() if isinstance(t, Tensor)]
        if isinstance(params, Mapping)
        else []
    )
    sizes = {t.shape[0] if t.dim() else None for t in tensors}
    if len(sizes) != 1 or None in sizes:
        raise InputError(f"{ENTRIES}; found {sorted(map(str, sizes))} members, where one number is needed")
    (members,) = sizes
    if not members:
        raise InputError(f"{ENTRIES}; there are none")
    return members


def _select(params: Mapping[str, Any], i: int) -> dict[str, Any]:
    return {k: _select(p, i) if isinstance(p, Mapping) else p[i] for k, p in params.items()}


def _into_one(fn: PerExampleGrad, members: int, arguments: Callable[[int], tuple[Any, Any, Any]]) -> Any:
    """The rows of each member written into its slice of one tensor."""
    with_losses = isinstance(fn, PerExampleValueAndGrad)
    first = fn(*arguments(0))
    rows = first[1] if with_losses else first
    whole = {k: r.new_empty(members, *r.shape) for k, r in rows.items()}
    for k, r in rows.items():
        whole[k][0] = r
    results = [first] + [
        fn(*arguments(i), out={k: w[i] for k, w in whole.items()}) for i in range(1, members)
    ]
    return (torch.stack([losses for losses, _ in results]), whole) if with_losses else whole


def chunked(fn: Function, size: int) -> Function:
    """`fn` on at most `size` examples at a time: the same result in less memory.

    >>> chunked(per_example_grad_norm(model), 2)(params, x, y).shape
    torch.Size([5])

    Args:
        fn: `(params, x, y) -> result`, whose tensors have the examples on dimension 0, or are a `Clipped`.
        size: examples at a time.

    Raises:
        InputError: where `size` is not a positive integer.
    """
    positive_int(size, "size")

    def in_chunks(params: Any, x: Any, y: Any = None) -> Any:
        batch = trees.batch_size(trees.flatten(trees.as_call(x))[0], trees.flatten(y)[0])
        return join(
            fn(params, *(trees.examples(tree, s.start, s.stop) for tree in (x, y)))
            for s in trees.runs(batch, size)
        )

    return in_chunks


def over_loader(
    fn: Function,
    loader: Iterable[Any],
    *,
    unpack: Unpack | None = None,
    reduce: Callable[[Any], Any] | None = None,
) -> Callable[[Any], Any]:
    """`fn` over every batch of a loader, put together as if they were one batch: a function of the parameters.

    >>> norms = over_loader(per_example_grad_norm(model), DataLoader(data, batch_size=64))(params)
    >>> norms.shape
    torch.Size([1000])

    Args:
        fn: `(params, x, y) -> result`, as for `chunked`.
        loader: gives batches, moved to the parameters' device: a pair (x, y), or (x,), or x alone.
        unpack: turns a batch of any other kind into (x, y).
        reduce: what is kept of the result of a batch, where all of it would be too much (rows of a data set, say).

    Raises:
        InputError: where the loader is empty or its batches cannot be told apart into x and y.
    """

    def over_batches(params: Any) -> Any:
        batches = pairs(loader, params, unpack)
        first = next(batches, None)
        if first is None:
            raise InputError("the loader gave no batch")
        results = (fn(params, x, y) for x, y in itertools.chain([first], batches))
        return join(results if reduce is None else map(reduce, results))

    return over_batches
