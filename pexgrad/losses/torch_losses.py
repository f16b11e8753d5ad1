"""The losses of torch itself, given directly: (B,) from the whole batch, by their own functions without a reduction."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]
PerExample = Callable[[Any, Any], Tensor | None]  # None: these shapes need the definition

# those whose reduction="none" is elementwise in output and target of one shape
_ELEMENTWISE = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
}
# those over classes, whose mean is weighted by the targets' classes
CLASSES = {F.cross_entropy: nn.CrossEntropyLoss, F.nll_loss: nn.NLLLoss}
PER_EXAMPLE = _ELEMENTWISE | CLASSES  # function -> the module of it
_FUNCTIONS = {module_type: function for function, module_type in PER_EXAMPLE.items()}


def vectorised(loss: Loss) -> PerExample | None:
    """The per-example form of a loss of torch given directly, or of a partial of one; None for any other.

    Its settings are read at each call.
    """
    own = _FUNCTIONS.get(type(loss), loss)
    function = loss.func if isinstance(loss, functools.partial) and not loss.args else own
    return functools.partial(_at_settings, function, loss) if function in PER_EXAMPLE else None


def _at_settings(function: Any, loss: Loss, output: Any, y: Any) -> Tensor | None:
    settings = _settings(loss)
    return None if settings is None else per_example(function, settings, output, y)


def _settings(loss: Loss) -> dict[str, Any] | None:
    """What a loss of torch's is called with beside output and target; None where it does more than its function."""
    if isinstance(loss, functools.partial):
        return dict(loss.keywords)
    if not isinstance(loss, nn.Module):
        return {}
    if "forward" in vars(loss) or loss._forward_hooks or loss._forward_pre_hooks:
        return None
    return {k: getattr(loss, k) for k in _names_of_settings(type(loss))}


@functools.cache
def _names_of_settings(module_type: type[nn.Module]) -> list[str]:
    given, held = inspect.signature(_FUNCTIONS[module_type]).parameters, module_type()
    return [k for k in given if hasattr(held, k) and k not in ("input", "target")]


def per_example(function: Any, settings: dict[str, Any], output: Any, y: Any) -> Tensor | None:
    """(b,): one of `PER_EXAMPLE` at these settings, reduced for each example; None where the definition is needed."""
    reduction = reduction_of(function, settings)
    if reduction is None or not isinstance(output, Tensor) or not isinstance(y, Tensor):
        return None
    return (_classes if function in CLASSES else _elementwise)(function, *reduction, output, y)


def reduction_of(function: Any, settings: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The reduction and the other settings; None where deprecated settings decide it, or there is no such reduction."""
    rest = dict(settings)
    if rest.pop("size_average", None) is not None or rest.pop("reduce", None) is not None:
        return None
    how = rest.pop("reduction", "mean")
    if how == "batchmean" and function is F.kl_div:
        how = "sum"  # over the one example
    return (how, rest) if how in ("mean", "sum", "none") else None


def _elementwise(function: Any, how: str, rest: dict[str, Any], output: Tensor, y: Tensor) -> Tensor | None:
    # a target of another shape is broadcast: against a batch, perhaps along the batch; and so may a weight be
    weights = (rest.get("weight"), rest.get("pos_weight"))
    if output.shape != y.shape or any(w is not None and w.dim() >= output.dim() for w in weights):
        return None
    each = function(output, y, reduction="none", **rest).reshape(output.shape[0], -1)
    return each.mean(1) if how == "mean" else each.sum(1)


def _classes(function: Any, how: str, rest: dict[str, Any], output: Tensor, y: Tensor) -> Tensor | None:
    if output.dim() < 2 or y.shape[:1] != output.shape[:1]:
        return None
    each = function(output, y, reduction="none", **rest)
    if how == "mean" and each.shape == y.shape == output.shape[:1] and rest.get("weight") is None:
        return each.masked_fill(y == rest.get("ignore_index", -100), float("nan"))  # the mean of none
    each = each.reshape(output.shape[0], -1)  # (b, positions)
    if how != "mean":
        return each.sum(1)
    if y.is_floating_point():  # class probabilities: a plain mean over positions
        return each.mean(1)
    total = _class_weights(y, output, rest).sum(1)
    # nan where nothing counts, also with label smoothing, of which torch divides each part
    return each.sum(1) / total + (total / total - 1)


def _class_weights(y: Tensor, output: Tensor, settings: dict[str, Any]) -> Tensor:
    """(b, positions): the weight of each target in the mean; zero where it is ignored."""
    labels = y.reshape(output.shape[0], -1)
    counted = labels != settings.get("ignore_index", -100)
    weight = settings.get("weight")
    if weight is None:
        return counted.to(output.dtype)
    return weight[labels.where(counted, 0).long()] * counted  # a mask is what uint8 would be
