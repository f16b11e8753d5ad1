"""Operations along dimensions of a value, by their names: each place looks at others on those dimensions, and at no other.

So examples mix where such a dimension is the batch (`mixing_by_shape.py`), and stay apart where it is another (`track_rules.py`).
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
# slices of a value are each brought to a size
SLICES = names("renorm group_norm native_group_norm layer_norm native_layer_norm rms_norm")
# along the last so many of (b, channels, ...)
WINDOWS = re.compile(
    r"(?:conv(?:_transpose)?|(?:adaptive_)?(?:avg|max)_pool|_?upsample_[a-z_]+)([123])d(?:_with_indices|_aa)?"
)


def dims_of(name: str, named: dict[str, Any], rank: int) -> set[int]:
    """The dimensions of a value that an operation goes along, counted from the front."""
    if name in ("triu", "tril"):
        return {rank - 2, rank - 1}
    if name == "renorm":
        return set(range(rank)) - {named["dim"] % rank}
    if name in ("group_norm", "native_group_norm"):
        return set(range(1, rank))
    if name in ("layer_norm", "native_layer_norm", "rms_norm"):
        return set(range(rank - len(named["normalized_shape"]), rank))
    if name in ("diagonal", "diagonal_scatter"):
        return {named["dim1"] % rank, named["dim2"] % rank}
    if name == "index_put":
        return {i for i, n in enumerate(named["indices"]) if n is not None}
    return _given_dims(named, rank)


def _given_dims(named: dict[str, Any], rank: int) -> set[int]:
    """The dimensions that an operation on a value of so many is given, counted from the front; all where it is given none."""
    dims = named.get("dim", named.get("dims"))
    if dims is None and named.get("s"):  # a Fourier transform of so many, the last
        dims = range(-len(named["s"]), 0)
    if dims in (None, [], ()):
        return set(range(rank))
    return {d % max(1, rank) for d in ([dims] if isinstance(dims, int) else dims)}
