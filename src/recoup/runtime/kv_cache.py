"""The key-value cache that transformers' models fill by default, also in training, where it is not read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from recoup.runtime.patch import class_forward


def caching_paths(modules: Mapping[str, nn.Module], regions_at: Sequence[str]) -> set[str]:
    """Returns the paths of modules above a region whose forward fills a cache by default and can run without one.

    transformers too drops the cache when its own checkpointing is on: the cache would hold keys and values that the
    regions drop. Models with recurrent layers (state-space and linear-attention hybrids, `_is_stateful`) keep it: with
    a cache these layers take another code path through their convolutions, which rounds differently. Their regions note
    the cache before the forward and restore it around the replay.

    Args:
        modules: modules by path; a repeated module under each of its paths.
        regions_at: paths of the regions.
    """
    stateful = [path for path, module in modules.items() if getattr(module, "_is_stateful", False)]
    above = {""} if regions_at else set()
    for path in regions_at:
        parts = path.split(".")
        above.update(".".join(parts[:i]) for i in range(1, len(parts)))
    found = set()
    for path in above:
        module = modules.get(path)
        config = getattr(module, "config", None)
        if module is None or not getattr(config, "use_cache", False):
            continue
        if any(path in ("", other) or other.startswith(f"{path}.") for other in stateful):
            continue
        if "use_cache" in _parameters(module):
            found.add(path)
    return found


def without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of a call with `use_cache=False`, however it was passed."""
    position = _parameters(module).index("use_cache")
    if position < len(args):
        return (*args[:position], False, *args[position + 1 :]), dict(kwargs)
    return args, {**kwargs, "use_cache": False}


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(class_forward(module)).parameters)
