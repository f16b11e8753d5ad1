"""Peak memory of one call, above what is in use when it starts.

On a GPU it is the allocator's count. On Linux it is the kernel's: writing 5 to `/proc/self/clear_refs` resets the peak
of the resident set, so workspaces inside kernels and other libraries' arrays are counted, and nothing is sampled.
Elsewhere there is none (`None`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

from benchmarks.timing import Call

PROC = Path("/proc/self")


def peak(call: Call, device: torch.device) -> int | None:
    """Bytes that `call` needs at its worst moment, its result included."""
    gc.collect()
    return cuda_peak(call) if device.type == "cuda" else linux_peak(call)


def cuda_peak(call: Call) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def linux_peak(call: Call) -> int | None:
    try:
        give_back_freed_memory()
        (PROC / "clear_refs").write_text("5")
        before = status("VmRSS")
    except OSError:
        return None
    call()
    return max(status("VmHWM") - before, 0)


def give_back_freed_memory() -> None:
    """Otherwise what an earlier call freed is used again and not counted."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def status(field: str) -> int:
    """A field of `/proc/self/status`, in bytes."""
    lines = (PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def stay_within_free_memory() -> None:
    """Make an allocation that the machine has no memory for an error of one contender, not the end of the process."""
    try:
        import resource

        meminfo = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
        limit = status("VmSize") + int(0.95 * available)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, OSError, ValueError):
        return
