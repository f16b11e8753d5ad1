"""Rows made small enough to store: all of them multiplied by one random matrix, which is never built as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .base.checks import described, positive_int
from .base.numerics import flat, gather, total
from .errors import InputError
from .inputs.call import example_numbers
from .operator.jacobian import Jacobian

# rows of one group of parameters that a projection holds at a time
ROWS_BYTES = 1 << 28
# entries of a projection's matrix drawn at a time; another number is another matrix
_BLOCK = 1 << 20


def project(jacobian: Jacobian, k: int, *, seed: int = 0) -> Tensor:
    """Every row multiplied by one random matrix with k columns, without keeping the rows.

    >>> J = per_example_jacobian(model)(params, x, y)
    >>> project(J, k=16).shape
    torch.Size([5, 16])

    phi_b = R^T g_b, with entries of R (P, k) that are +1 or -1 over sqrt(k). Inner products are kept in expectation,
    <phi_b, phi_c> = <g_b, g_c> up to an error of about |g_b| |g_c| / sqrt(k) (Johnson and Lindenstrauss), which is how
    TRAK makes gradients small enough to store: Park et al. 2023 (arXiv 2303.14186).

    Rows are built for one group of parameters and a bounded number of examples at a time (256 MiB, or one example's),
    and R in blocks that follow from the seed, the parameter's name and the position in it. So batches of any sizes and
    calls for other data are projected by the same R, on devices of the same type.

    Args:
        jacobian: of B examples.
        k: the number of columns.
        seed: which R.

    Returns:
        (B, k), in at least float32.

    Raises:
        InputError: where `jacobian` is none, or `k` is not a positive integer.
    """
    if not isinstance(jacobian, Jacobian):
        raise InputError(
            f"jacobian is {described(jacobian)}; expected what per_example_jacobian(model)(params, x, y) gives"
        )
    positive_int(k, "k")
    dtype = example_numbers([*jacobian.leaves.values()]).dtype
    found = jacobian.losses.new_zeros(jacobian.batch, k, dtype=dtype)
    with jacobian.working():
        for component in jacobian.components:
            pieces = component.pieces(ROWS_BYTES)
            found = found + gather([_project_rows(piece.rows(), k, seed, dtype) for piece in pieces])
        return found / k**0.5


def _project_rows(rows: dict[str, Tensor], k: int, seed: int, dtype: torch.dtype) -> Tensor:
    """(b, k)"""

    def parts() -> Iterator[Tensor]:
        for name, r in rows.items():
            numbers = flat(torch.view_as_real(r.resolve_conj()) if r.is_complex() else r).to(dtype)
            for i, block in enumerate(numbers.split(max(1, _BLOCK // k), dim=1)):
                yield block @ _signs(block.shape[1], k, f"{seed} {name} {i}", r.device).to(dtype)

    return total(parts())


def _signs(n: int, k: int, key: str, device: torch.device) -> Tensor:
    """(n, k) of +1 and -1 that follow from the key."""
    number = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
    generator = torch.Generator(device).manual_seed(number)
    drawn = torch.randint(256, (n * k // 8 + 1,), generator=generator, device=device, dtype=torch.uint8)
    bits = drawn[:, None].bitwise_right_shift(torch.arange(8, device=device, dtype=torch.uint8)) & 1
    return bits.flatten()[: n * k].reshape(n, k).to(torch.int8) * 2 - 1
