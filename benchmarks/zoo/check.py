"""What a member of the zoo comes to: exact, refused, wrong or crashed, against a loop over batches of one."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import pexgrad
from benchmarks.zoo.member import Member, batch_of, call, settle, wave

TOLERANCE = 1e-8
# rows of more parameters than this are compared a group of parameters at a time, to bound memory
GROUP = 60_000_000

Record = dict[str, Any]


def check(member: Member) -> Record:
    """Build the model, get its rows, compare them with the loop."""
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, x = member.build()
        model = settle(model)
    except Exception as e:  # noqa: BLE001 - no model, no verdict on the library
        return {
            "source": member.source,
            "family": member.family,
            "mixes": member.mixes,
            "verdict": "unusable",
            "why": brief(e),
        }
    x = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, x)
    params = {k: p for k, p in model.named_parameters() if p.requires_grad}
    record: Record = {
        "source": member.source,
        "family": member.family,
        "mixes": member.mixes,
        "parameters": sum(p.numel() for p in params.values()),
    }
    started = time.perf_counter()
    try:
        reference = independent(model, x)
    except Exception as e:  # noqa: BLE001 - the model itself does not run: no verdict on the library
        return record | {"verdict": "unusable", "why": brief(e)}
    record["dependent"] = not reference
    errors: list[tuple[float, str]] = []
    trace_time, fallback = 0.0, 0
    for group in groups(params):
        try:
            rows, seconds, n = rows_of(model, group, x)
        except pexgrad.PexgradError as e:
            return record | {"verdict": "refused", "error": type(e).__name__, "why": brief(e)}
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the verdict
            return record | {"verdict": "crashed", "error": type(e).__name__, "why": brief(e)}
        trace_time, fallback = trace_time or seconds, fallback + n
        errors += compare(model, group, rows, x)
    worst, name = max(errors)
    record |= {"trace_s": round(trace_time, 2), "fallback_sites": fallback, "relative_error": worst}
    record["check_s"] = round(time.perf_counter() - started, 1)
    if not worst < TOLERANCE:
        return record | {"verdict": "wrong", "why": f"{name}: relative error {worst:.1e}"}
    return record | {"verdict": "exact"}


def groups(params: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = [{}]
    size = 0
    for k, p in params.items():
        if found[-1] and size + p.numel() > GROUP:
            found.append({})
            size = 0
        found[-1][k] = p
        size += p.numel()
    return found


def rows_of(model: nn.Module, params: dict[str, Tensor], x: Any) -> tuple[dict[str, Tensor], float, int]:
    fn = pexgrad.per_example_grad(model, wave)
    started = time.perf_counter()
    table = fn.explain(params, x)
    seconds = time.perf_counter() - started
    return fn(params, x), seconds, sum("fallback" in line.flags for line in table.lines)


def example(x: Any, b: int) -> Any:
    return tree_map(lambda t: t[b : b + 1].clone() if isinstance(t, Tensor) else t, x)


def independent(model: nn.Module, x: Any) -> bool:
    """Whether the outputs of a batch are those of its examples alone."""
    with torch.no_grad():
        whole = wave(call(model, example_all(x)))
        if not whole.isfinite().all():
            raise ValueError("the model's output is not finite")
        alone = torch.cat([wave(call(model, example(x, b))) for b in range(batch_of(x))])
    return bool((whole - alone).abs().max() < 1e-9 * whole.abs().max().clamp(min=1))


def example_all(x: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)


def compare(
    model: nn.Module, params: dict[str, Tensor], rows: dict[str, Tensor], x: Any
) -> list[tuple[float, str]]:
    """The largest relative error of each parameter's rows, a row at a time."""
    assert list(rows) == list(params)
    errors = []
    for b in range(batch_of(x)):
        want = row(model, params, example(x, b))
        overall = sum(float(w.square().sum()) for w in want) ** 0.5
        found = list(differences(params, {k: r[b] for k, r in rows.items()}, want, overall))
        if not max(found)[0] < TOLERANCE:
            # PyTorch's CPU batch norm in evaluation mode has a wrong backward at batch size 1 for some memory
            # layouts: twice the example in a batch, halved, is the same row without it
            want = [w / 2 for w in row(model, params, tree_map(twice, example(x, b)))]
            found = list(differences(params, {k: r[b] for k, r in rows.items()}, want, overall))
        errors += found
    return errors


def row(model: nn.Module, params: dict[str, Tensor], x: Any) -> list[Tensor]:
    grads = torch.autograd.grad(wave(call(model, x)).sum(), list(params.values()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)]


def twice(t: Any) -> Any:
    return torch.cat([t, t]) if isinstance(t, Tensor) else t


def differences(
    params: dict[str, Tensor], got: dict[str, Tensor], want: list[Tensor], overall: float
) -> Iterator[tuple[float, str]]:
    """The relative error of each parameter's gradient."""
    for (name, p), w in zip(params.items(), want, strict=True):
        assert got[name].shape == p.shape
        # a gradient that is zero but for rounding is measured against the whole row
        scale = max(float(w.norm()), 1e-4 * overall, 1e-12)
        error = float((got[name] - w).norm()) / scale
        yield error if error == error else float("inf"), name


def brief(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    # paths from the library's own folder on
    return re.sub(r"/\S*/site-packages/", "", lines[0])[:400] if lines else type(e).__name__


def record_of_exit(member: Member, why: str) -> Record:
    return {
        "source": member.source,
        "family": member.family,
        "mixes": member.mixes,
        "verdict": "crashed",
        "why": why,
    }


def as_json(member: Member) -> Record:
    """For a listing: everything but the builder."""
    return {f.name: getattr(member, f.name) for f in dataclasses.fields(member) if f.name != "build"}
