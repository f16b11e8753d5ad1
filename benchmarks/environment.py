"""Where a measurement was made: the device, the versions, the settings that change a number."""

from __future__ import annotations

import hashlib
import platform
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

PACKAGES = ("torch", "torchvision", "opacus", "backpack-for-pytorch", "jax", "numpy")


def prepare(device: torch.device, threads: int, tf32: bool) -> None:
    """Settings for the whole process."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if device.type == "cuda":
        torch.zeros(1, device=device)


def describe(device: torch.device) -> dict[str, object]:
    """What is stored beside every number."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32 if device.type == "cuda" else None,
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "pexgrad": {"version": version("pexgrad"), "source": source_digest()},
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def slug(device: torch.device, threads: int) -> str:
    """The device in a file name: `cpu-2-threads`, `nvidia-h100`."""
    name = device_name(device) if device.type == "cuda" else f"cpu {threads} threads"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def source_digest() -> str | None:
    """Eight digits of the library's source, so that a change of it makes old numbers old."""
    spec = find_spec("pexgrad")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    text = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:8]
