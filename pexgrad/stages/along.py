"""Operations along dimensions of a value, by their names: each place looks at others on those dimensions, and at no other.

So examples mix where such a dimension is the batch (`mixing_by_shape.py`), and stay apart where it is another (`leading.py`).
"""

from __future__ import annotations

import re
from typing import Any


def names(text: str) -> frozenset[str]:
    """Names of operations, one after the other."""
    return frozenset(text.split())


# along the dimensions that they are given
SCANS = names("""
    cumsum cumprod cummax cummin logcumsumexp sort argsort topk kthvalue median mode softmax _softmax log_softmax _log_softmax
    flip roll diff fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
    fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfft fft_ihfft
""")
# along the last so many of (b, channels, ...)
WINDOWS = re.compile(
    r"(?:conv(?:_transpose)?|(?:adaptive_)?(?:avg|max)_pool|_?upsample_[a-z_]+)([123])d(?:_with_indices|_aa)?"
)


def given_dims(named: dict[str, Any], rank: int) -> set[int]:
    """The dimensions that an operation on a value of so many is given, counted from the front; all where it is given none."""
    dims = named.get("dim", named.get("dims"))
    if dims is None and named.get("s"):  # a Fourier transform of so many, the last
        dims = range(-len(named["s"]), 0)
    if dims in (None, [], ()):
        return set(range(rank))
    return {d % max(1, rank) for d in ([dims] if isinstance(dims, int) else dims)}
