"""Results of chosen ops that a region keeps: its replay reuses them instead of running the ops again.

A dispatch mode over the region's first forward stores the results; another over its replay returns them at the same
positions. Both act below autograd, so the replay builds its graph as usual. This is selective checkpointing (as in
`torch.utils.checkpoint.create_selective_checkpoint_contexts`) with two differences: a result that was changed in place
since is recomputed instead of refused, and an attention that draws dropout is never kept, because reusing its result
would not advance the random stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from recoup import _torch
from recoup.cost.flops import kind, result_label
from recoup.runtime.recompute.rng_state import version_of


class Kept:
    """Results that one call of a region keeps.

    Attributes:
        labels: labels of the ops whose results are kept.
        results: by position among the call's heavy ops: the op, its results, and their version counters.
    """

    __slots__ = ("labels", "results")

    def __init__(self, labels: Iterable[str]) -> None:
        self.labels = frozenset(labels)
        self.results: dict[int, tuple[Any, Any, list[int]]] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Stores results of ops that run inside of the block, the first forward."""
        if not self.labels:
            yield
            return
        with _Mode(self, takes=False):
            yield

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Returns the stored results inside of the block, a replay."""
        if not self.results:
            yield
            return
        with _Mode(self, takes=True):
            yield


@_torch.without_dynamo_wrapper
class _Mode(_torch.dispatch_mode_class()):  # type: ignore[misc]
    def __init__(self, kept: Kept, *, takes: bool) -> None:
        super().__init__()
        self._kept = kept
        self._takes = takes
        self._position = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.is_higher_order(func):
            return func(*args, **kwargs)
        if not _is_heavy(func):
            return func(*args, **kwargs)
        self._position += 1
        results = self._kept.results
        if self._takes:
            known, out, versions = results.get(self._position, (None, None, []))
            if known is func and [version_of(t) for t in _tensors(out)] == versions:
                return _alias(out)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if result_label(str(func), args) in self._kept.labels and not _draws(func, args, kwargs):
            alias = _alias(out)
            results[self._position] = (func, alias, [version_of(t) for t in _tensors(alias)])
        return out


@functools.cache
def _is_heavy(func: Any) -> bool:
    name = str(func)
    return kind(name) != "other" and "backward" not in name and not func._schema.is_mutable


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op draws random numbers: it may, and its dropout probability is not zero."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True


def _tensors(out: Any) -> list[torch.Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]


def _alias(out: Any) -> Any:
    """Returns the results as new tensors over the same memory: autograd sets metadata on the tensors it is given."""
    if isinstance(out, (tuple, list)):
        return tuple(_alias(t) for t in out)
    return _torch.alias_below_autograd(out) if isinstance(out, torch.Tensor) else out
