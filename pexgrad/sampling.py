"""Examples drawn by the norms of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base.checks import described, not_negative, positive_int
from .errors import InputError


@dataclass(frozen=True)
class ImportanceSample:
    """Examples drawn in proportion to a measure of their importance.

    Attributes:
        index: (k,), which examples, with repeats.
        weights: (k,), 1 / (N k p), so that sum_j weights[j] g[index[j]] estimates the mean row.
        probabilities: (N,), with which an example is drawn.
    """

    index: Tensor
    weights: Tensor
    probabilities: Tensor


def importance_sample(
    norms: Tensor, k: int, *, uniform: float = 0.0, generator: torch.Generator | None = None
) -> ImportanceSample:
    """Draw k examples with probabilities in proportion to their gradients' norms, and the weights that undo the bias.

    >>> norms = per_example_grad_norm(model)(params, x, y)
    >>> drawn = importance_sample(norms, 3, uniform=0.1)
    >>> J = per_example_jacobian(model)(params, x[drawn.index], y[drawn.index])
    >>> mean_gradient = J.T @ drawn.weights  # unbiased
    >>> mean_gradient["weight"].shape
    torch.Size([2, 3])

    p_i = (1 - u) |g_i| / sum_j |g_j| + u / N. With u = 0 and norms of the current parameters this has the least
    variance of all ways to draw with replacement: Zhao and Zhang 2015 (arXiv 1401.2753). Norms that are out of date
    keep the estimate unbiased as long as no probability is zero where a gradient is not, which any u > 0 ensures.

    Args:
        norms: (N,), of the gradients or anything else at least 0; all zero counts as all equal.
        k: how many to draw, with replacement.
        uniform: the part u, in [0, 1], of the probability that is spread evenly.
        generator: for repeatable draws.

    Returns:
        `ImportanceSample` with `index` (k,), `weights` (k,) and `probabilities` (N,); the last two in the norms' dtype.

    Raises:
        InputError: where `norms` is not (N,) of finite floating-point numbers at least 0, or `k` or `uniform` is out of range.
    """
    if not isinstance(norms, Tensor) or norms.dim() != 1 or not len(norms):
        raise InputError(f"norms is {described(norms)}; expected (N,) with N at least 1")
    if not norms.is_floating_point():
        raise InputError(f"norms is in {norms.dtype}; expected floating-point numbers, such as norms.float()")
    wrong = ~(norms.isfinite() & (norms >= 0))
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise InputError(f"norms[{i}] is {norms[i].item()}; every entry must be finite and at least 0")
    uniform = not_negative(uniform, "uniform")
    if uniform > 1:
        raise InputError(f"uniform={uniform!r} must be in [0, 1]")
    positive_int(k, "k")
    p = norms.detach().double()
    p = p / p.sum() if p.any() else torch.full_like(p, 1 / len(p))
    p = (1 - uniform) * p + uniform / len(p)
    device = p.device if generator is None else generator.device
    draws = torch.rand(k, generator=generator, dtype=p.dtype, device=device)
    # an example of probability zero owns no part of [0, sum), so it is never found
    cumulative = p.cumsum(0)
    index = torch.searchsorted(cumulative, draws.to(p.device) * cumulative[-1], right=True)
    index = index.clamp(max=int(p.nonzero().max()))
    return ImportanceSample(index, (1 / (len(p) * k * p[index])).to(norms.dtype), p.to(norms.dtype))
