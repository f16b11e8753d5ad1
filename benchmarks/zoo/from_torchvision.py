"""Every classification model of torchvision, at the smallest image it takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.member import Member

SIZES = (32, 64, 96, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384)

DEEP = (
    "vit_l_16",
    "vit_l_32",
    "vit_h_14",
)  # 24 to 32 blocks of one kind, of which four stay: to bound time and memory


def members() -> Iterator[Member]:
    from torchvision import models

    for name in models.list_models(module=models):
        family = models.get_model_builder(name).__module__.split(".")[-1]
        yield Member("torchvision", family, name, partial(build, name))


def build(name: str) -> tuple[nn.Module, Any]:
    from torchvision import models

    make = models.get_model_builder(name)
    options: dict[str, Any] = {"weights": None}
    if name.startswith("vit_"):
        options["image_size"] = 28 if "h_14" in name else 32
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # slow
    if name == "maxvit_t":
        options["input_size"] = (224, 224)
    model = make(**options)
    if name in DEEP:
        del model.encoder.layers[4:]
    return smallest(model, options.get("image_size"))


def smallest(model: nn.Module, fixed: int | None = None) -> tuple[nn.Module, torch.Tensor]:
    """The model with two images of the smallest size that it runs on."""
    model.eval().double()
    for size in (fixed,) if fixed else SIZES:
        x = torch.randn(2, 3, size, size, dtype=torch.float64)
        try:
            with torch.no_grad():
                out = model(x)
        except Exception:
            if size == SIZES[-1] or fixed:
                raise
            continue
        if all(t.isfinite().all() for t in torch.utils._pytree.tree_leaves(out)):
            return model, x
    raise ValueError("no image size gives a finite output")
