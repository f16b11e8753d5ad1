"""Parameters as nested dicts, as functions in the JAX style take them: flat inside, nested outside.

{"layer": {"w": w, "b": b}}    <->    {"layer.w": w, "layer.b": b}
{0: {"w": w}, 1: {"w": v}}     <->    {"0.w": w, "1.w": v}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import InputError

Structure = tuple[tuple[str, ...], ...]  # the path to each tensor, in order


def is_nested(params: Any) -> bool:
    """Whether a dict holds dicts, or has keys other than strings: whether `flatten` would change it."""
    return isinstance(params, Mapping) and any(
        isinstance(v, Mapping) or not isinstance(k, str) for k, v in params.items()
    )


def structure(params: Mapping[str, Any]) -> Structure:
    """The path to each tensor."""
    return tuple(path for path, _ in _by_name(params).values())


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """name -> tensor, where the name of a nested entry is its path joined by dots."""
    return {name: leaf for name, (_, leaf) in _by_name(params).items()}


def nest(flat: Mapping[str, Any], paths: Structure) -> dict[str, Any]:
    """The inverse of `flatten`."""
    result: dict[str, Any] = {}
    for path in paths:
        at = result
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = flat[name_of(path)]
    return result


def like(params: Mapping[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    """`flat`, nested as `params` is."""
    return nest(flat, structure(params)) if is_nested(params) else flat


def at(paths: Structure, leaves: Sequence[Any]) -> dict[str, Any]:
    """The nested dict with these leaves at these paths."""
    return nest({name_of(path): leaf for path, leaf in zip(paths, leaves, strict=True)}, paths)


def taking_flat(function: Callable[..., Any], paths: Structure) -> Callable[..., Any]:
    """`function(nested, ...)` as a function of the flat dict."""

    def flat_function(params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return function(nest(params, paths), *args, **kwargs)

    return flat_function


def name_of(path: tuple[Any, ...]) -> str:
    """The flat name of the entry at a path of keys."""
    return ".".join(map(str, path))


def _by_name(params: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], Any]]:
    """name -> (path, tensor)."""
    found: dict[str, tuple[tuple[str, ...], Any]] = {}
    for path, leaf in _leaves(params, ()):
        if (name := name_of(path)) in found:
            raise InputError(
                f"params holds two entries for {name!r}: as a path of keys joined by dots, and once more"
            )
        found[name] = path, leaf
    return found


def _leaves(params: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for k, v in params.items():
        if isinstance(v, Mapping):
            yield from _leaves(v, (*prefix, k))
        else:
            yield (*prefix, k), v
