"""Every rule on the device: float32 with TF32 off, against a loop in float64 on the CPU, over the tests' models.

Each case is checked for rows, norms and clipped sums, and where it has a convolution for rows by every rule. A case
passes below a relative error of 1e-4. How models are traced is the tests' business: here are the families of rules.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from benchmarks import environment
from benchmarks.contenders.ours import CONV_RULES
from benchmarks.contenders.registry import Rows, clipped_sum, norms, reason
from benchmarks.results import Record

TESTS = Path(__file__).parent.parent / "tests"
TOLERANCE = 1e-4
FAMILIES = ("attention", "conv", "dense", "embedding", "norm", "products", "recurrent")
LEFT_OUT = {"refused", "may_refuse", "random", "half"}


def run_checks(device: torch.device, path: Path, minutes: float) -> None:
    """Check cases, as many as there is time for, and write one JSON file; each case's worst error, or why it failed."""
    cases, rows_of = load_table()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    checked: Record = {}
    start = time.monotonic()
    for case in tqdm(cases, desc="check", unit="case"):
        if time.monotonic() - start > 60 * minutes:
            print(f"time is up: {len(cases) - len(checked)} cases are left")
            break
        checked[case.name] = check_case(case, rows_of, device)
    record = {"experiment": "check", **environment.describe(device), "cases": checked}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    failed = {name: case for name, case in checked.items() if not case["ok"]}
    print(f"{len(checked) - len(failed)} of {len(checked)} cases within {TOLERANCE:g}")
    for name, case in failed.items():
        print(f"  {name}: {case['why']}")


def load_table() -> tuple[list[Any], Callable[..., Rows]]:
    """The tests' models with independent examples and no random numbers, and the tests' loop."""
    sys.path.insert(0, str(TESTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in FAMILIES:
            __import__(f"cases.{family}")
    from cases.case import TABLE
    from oracle import rows_of

    return [case for case in TABLE.values() if not case.tags & LEFT_OUT], rows_of


def check_case(case: Any, rows_of: Callable[..., Rows], device: torch.device) -> Record:
    try:
        torch.set_default_dtype(torch.float64)
        model, x, y, loss = case.build()
        want = rows_of(model, loss, x, y)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(device if device.type != "cpu" else None)
        move(model, device)
        x, y = tree_map(lambda v: to_float32(v, device), (x, y))
        errors = dict(errors_of(model, loss, x, y, {name: rows.cpu() for name, rows in want.items()}))
    except Exception as failure:  # noqa: BLE001 - whatever a case dies of is its result
        return {"ok": False, "why": reason(failure)}
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    worst = max(errors, key=errors.__getitem__)
    ok = errors[worst] < TOLERANCE
    return {"ok": ok, "error": errors[worst], "in": worst} | (
        {} if ok else {"why": f"relative error {errors[worst]:.1e} in {worst}"}
    )


def errors_of(model: nn.Module, loss: Any, x: Any, y: Any, want: Rows) -> Iterator[tuple[str, float]]:
    """(what was asked for, its relative error) for rows by each rule, norms and clipped sums."""
    import pexgrad

    params = dict(model.named_parameters())
    has_convolution = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())
    for rule in ("auto", *CONV_RULES) if has_convolution else ("auto",):
        rows = pexgrad.per_example_grad(model, loss, conv_rule=rule)(params, x, y)
        yield f"rows ({rule})", error(rows, want)
    expected = norms(want)
    if hasattr(pexgrad, "per_example_grad_norm"):
        found = pexgrad.per_example_grad_norm(model, loss)(params, x, y)
        yield "norms", error({"": found}, {"": expected})
    bound = expected.median().item()
    clipped = pexgrad.clipped_grad(model, loss, max_norm=bound)(params, x, y)
    yield "clipped", error(clipped.grads, clipped_sum(want, bound))


def error(got: Rows, want: Rows) -> float:
    """The worst over parameters; one whose gradient is zero but for rounding counts by the whole's norm."""
    floor = 1e-3 * sum(w.norm() ** 2 for w in want.values()) ** 0.5
    return max(
        ((to_float64(got[n]) - w).norm() / (w.norm() + floor)).item() for n, w in want.items() if w.numel()
    )


def to_float64(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def to_float32(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    return value.detach().to(device, narrow.get(value.dtype, value.dtype))


def move(model: nn.Module, device: torch.device) -> None:
    """Parameters, buffers and tensors that are plain attributes, in place, so that ties stay tied."""
    for t in [*model.parameters(), *model.buffers()]:
        t.data = to_float32(t, device)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, to_float32(value, device))
