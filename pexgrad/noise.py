"""Gaussian noise for a clipped sum."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import torch
from torch import Tensor

from .base import nested
from .base.checks import described, not_negative
from .base.numerics import accumulable
from .errors import InputError


def add_noise(
    grads: Mapping[str, Tensor],
    noise_multiplier: float,
    max_norm: float,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """A clipped sum plus Gaussian noise of standard deviation `noise_multiplier * max_norm` in every element.

    This is the Gaussian mechanism of Abadi et al. 2016 (arXiv 1607.00133), algorithm 1, for the *sum*; divide by the
    expected batch size afterwards.

    >>> out = clipped_grad(model, max_norm=1.0)(params, x, y)
    >>> noisy = add_noise(out.grads, noise_multiplier=1.1, max_norm=1.0)

    What is private: the noisy sum, to the extent that an accountant says for your sampling of batches. What is not: `norms` and
    `losses` of the same call, the clean `grads`, and anything chosen by looking at them. The noise is floating-point
    noise from a pseudo-random generator that is not a cryptographic one; it does not withstand an adversary who exploits
    the rounding of floating-point numbers (Mironov 2012) or who knows the seed. Half precision is noised in float32 and
    rounded afterwards; a complex gradient counts as two real ones.

    Args:
        grads: name -> (*shape), the sum of clipped gradients.
        noise_multiplier: standard deviation in units of the sensitivity, at least 0.
        max_norm: the sensitivity, that is the norm to which each example was clipped, in units of the gradient.
        generator: a seeded generator makes the noise repeatable, for experiments; without one it is seeded from the
            system's entropy at each call, and torch's global generators are neither used nor advanced.

    Returns:
        name -> (*shape), new tensors.

    Raises:
        InputError: where `grads` is no dict, or `noise_multiplier` or `max_norm` is negative or not finite.
    """
    if not isinstance(grads, Mapping):
        raise InputError(
            f"grads is {described(grads)}; expected the sum by name, such as the .grads of a clipped sum"
        )
    scale = not_negative(noise_multiplier, "noise_multiplier") * not_negative(max_norm, "max_norm")
    noisy = {
        k: _noisy(g, scale, generator or fresh_generator(g.device)) for k, g in nested.flatten(grads).items()
    }
    return nested.like(grads, noisy)


def _noisy(g: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    if g.is_complex():  # both parts: torch's own complex normal numbers have half the variance in each
        return torch.view_as_complex(_noisy(torch.view_as_real(g.resolve_conj()), scale, generator))
    # normal numbers in half precision are few; the noisy sum is rounded once, afterwards
    wide = accumulable(g)
    noise = torch.randn(g.shape, generator=generator, device=generator.device, dtype=wide.dtype)
    return (wide + scale * noise.to(g.device)).to(g.dtype)


# where a CPU generator's state, as bytes, holds the words of its Mersenne twister
_WORDS, _WORDS_AT = 624, 24


def fresh_generator(device: torch.device) -> torch.Generator:
    """A generator that nobody can try all seeds of.

    A seed sets only 32 bits of the CPU's generator, so there the whole state is drawn. Others take the 63 bits.
    """
    generator = torch.Generator(device).manual_seed(secrets.randbits(63))
    if device.type == "cpu":
        state = generator.get_state()
        words = state[_WORDS_AT : _WORDS_AT + 8 * _WORDS].view(torch.int64)
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(4 * _WORDS)), dtype=torch.int32)
        words.copy_(drawn.long() & 0xFFFFFFFF)
        generator.set_state(state)
    return generator
