"""A few examples and slightly changed parameters, on which a new trace is probed and verified.

The parameters are jittered so that a layer initialised to zero does not hide everything before it. Own
generators are used throughout: the global ones are neither read nor advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..base.numerics import in_pieces, is_inexact
from ..inputs.call import Call

# batch sizes to try, in this order: three tell the parts of a fold apart
SIZES = (3, 2, 4, 5, 6, 8, 16, 32, 64)

# ways to make up examples where the batch has too few:
#   scrambled   values from elsewhere, which may not fit one another (a box whose left edge is right of its right one)
#   noisy       numbers with noise, which some models do not take (ids in a table of floats)
#   repeated    the user's own once more
REPEATED = "repeated"
MADE_UP = ("scrambled", "noisy", REPEATED)


def ways_to_draw(serves: Callable[[int], bool], call: Call) -> Sequence[str]:
    """Those of `MADE_UP` to try in turn; where there are enough examples they are all the same."""
    return MADE_UP if call.batch < _size(serves, call) else MADE_UP[-1:]


def _size(serves: Callable[[int], bool], call: Call) -> int:
    return next((n for n in (*SIZES, call.batch) if serves(n)), call.batch)


def draw(serves: Callable[[int], bool], call: Call, made_up: str) -> Call:
    """Take a few of the user's examples, and more in one of the ways of `MADE_UP` where there are too few.

    The second is the one that differs from the first in the most inputs.
    """
    batch, size = call.batch, _size(serves, call)
    generator = torch.Generator().manual_seed(0)
    order = _order(call)
    few = call.take([order[i % batch] for i in range(size)])
    if batch < size and made_up != REPEATED:
        scramble = made_up == "scrambled" and batch == 1
        few = few.with_inputs(lambda t: _varied(t, batch, generator, scramble))
    trainable = set(call.trainable)
    return few.at(
        {k: _jitter(p, generator) if k in trainable else p.detach() for k, p in call.params.items()}
    )


def _jitter(p: Tensor, generator: torch.Generator) -> Tensor:
    fan_in = p[0].numel() if p.dim() > 1 and p.shape[0] else 100
    floor = 0.1 / max(1, fan_in) ** 0.5
    jittered = p.detach().clone()  # in the memory layout of p, without gaps
    for piece in in_pieces(jittered.as_strided((p.numel(),), (1,))):
        piece.addcmul_(normal_like(piece, generator), piece.abs().mul_(0.1).add_(floor))
    return jittered.requires_grad_()


def _order(call: Call) -> list[int]:
    """The first example, then the one that differs from it in the most tensors, then the others."""
    others = torch.zeros(call.batch, dtype=torch.long, device="cpu")
    for t in _compared(call):
        others += (t != t[:1]).reshape(call.batch, -1).any(1).cpu()
    first = [0, int(others.argmax())] if bool(others.any()) else [0]
    return first + [b for b in range(call.batch) if b not in first]


def _compared(call: Call) -> list[Tensor]:
    """The tensors that noise cannot change, of whose role the examples themselves must tell."""
    return [t for t in call.inputs() if not is_inexact(t)] + call.targets()


def alike(call: Call, *, inputs: bool, targets: bool) -> tuple[int, ...]:
    """Of the compared tensors, those of which all examples are the same; with or without the inputs and the targets."""
    compared, n_targets = _compared(call), len(call.targets())
    asked = [inputs] * (len(compared) - n_targets) + [targets] * n_targets
    return tuple(i for i, t in enumerate(compared) if asked[i] and _is_alike(t))


def still_alike(call: Call, which: Sequence[int]) -> bool:
    """Whether in these, too, all examples are the same."""
    tensors = _compared(call) if which else []
    return all(_is_alike(tensors[i]) for i in which)


def _is_alike(t: Tensor) -> bool:
    return bool((t == t[:1]).all())


def _noise(t: Tensor, generator: torch.Generator) -> Tensor:
    return normal_like(t, generator) * (0.3 * t.abs() + 0.1)


# random numbers after which they begin again: a prime, so that they stand elsewhere in the next line of a matrix
_PERIOD = 65_537


def normal_like(t: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of t's shape: the same on every device, and whatever the default one."""
    with _disable_current_modes():  # among them the one in which random numbers stand still
        numbers = torch.randn(min(t.numel(), _PERIOD), generator=generator, device="cpu")
    numbers = numbers.to(t.device, t.dtype)
    return numbers.repeat(-(-t.numel() // _PERIOD))[: t.numel()].view(t.shape)


def varied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Numbers with noise, so that no two are alike."""
    generator = torch.Generator().manual_seed(0)
    return [t + _noise(t, generator) if is_inexact(t) else t for t in tensors]


def shrunk(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Numbers that are each a little nearer to zero: probabilities stay probabilities."""
    generator = torch.Generator().manual_seed(0)
    return [
        t * (1 - 0.2 * normal_like(t, generator).abs().clamp(max=4)) if is_inexact(t) else t for t in tensors
    ]


def _varied(t: Tensor, start: int, generator: torch.Generator, scramble: bool) -> Tensor:
    """`t` with other examples from `start` on: with noise on numbers; with `scramble`, with values from elsewhere in `t`."""
    out, part = t.clone(), t[start:]
    if is_inexact(t):
        if _takes_noise(t):
            out[start:] += _noise(part, generator)
    elif scramble and t.numel() and t.device.type == "cpu":  # an index out of range would end a CUDA process
        with _disable_current_modes():
            places = torch.randint(t.numel(), part.shape, generator=generator, device="cpu")
        out[start:] = t.flatten()[places]
    return out


def all_but(t: Tensor, b: int, generator: torch.Generator) -> Tensor:
    """`t` with all examples but b changed: noise for numbers; for the rest, whose values must be ones that the model takes,
    copies of example b.
    """
    if not is_inexact(t):
        return t[b : b + 1].expand_as(t).clone()
    if not _takes_noise(t):
        return others_exchanged(t, b, generator)
    out = t + _noise(t, generator)
    out[b] = t[b]
    return out


def _takes_noise(t: Tensor) -> bool:
    """Whether noise may be tried: an index out of range is an error on a CPU, and may be the end of the process anywhere else."""
    return t.device.type == "cpu" or not may_be_ids(t)


def may_be_ids(t: Tensor) -> bool:
    """Whether there are integers beyond 1 among real numbers, such as ids in a table of floats."""
    return t.is_floating_point() and bool(((t == t.round()) & (t.abs() > 1)).any())


def others_exchanged(t: Tensor, b: int, _: torch.Generator) -> Tensor:
    """`t` with all examples but b changed for one another, or for example b."""
    out = t.roll(1, 0)
    out[b] = t[b]
    return out
