"""State of the engine on this thread, for observers (capture, `verify`) and for users' own code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from recoup.runtime.step_log import Counts, Event, StepLog


class Observer(Protocol):
    """Is notified of each tensor that autograd saves."""

    def saved(self, tensor: torch.Tensor) -> None:
        """The tensor is kept."""

    def rederived(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """The tensor is not kept: it will be rebuilt from `sources`, which are kept."""


class Original(Protocol):
    """A tensor as a region's first forward saved it."""

    def compare(self, again: torch.Tensor, region: str) -> None:
        """Compares it with the tensor that the replay saved in its place."""


class Auditor(Protocol):
    """Compares replays with first forwards."""

    def keep(self, tensor: torch.Tensor) -> Original | None:
        """Returns a handle on a tensor that a region saves, or None."""


class _Activity(threading.local):
    observer: Observer | None = None
    auditor: Auditor | None = None
    tiles = 0
    stand_in: Any = None
    stands_for: str = ""
    is_unwatched: bool = False

    def __init__(self) -> None:
        self.replaying = threading.RLock()  # held, as often as they nest, while this thread replays something
        self.own = Counts()
        self.counts: tuple[Counts, ...] = (self.own,)


_activity = _Activity()


def is_recomputing() -> bool:
    """Whether this thread is replaying: a region's second forward, or the rebuild of a saved tensor.

    For counters and logs in a model's forward that must run once a step. Raises nothing.

    Example:
        >>> recoup.is_recomputing()
        False
    """
    return _activity.replaying._is_owned()  # type: ignore[attr-defined,no-any-return]


def recomputing() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager inside of which `is_recomputing()` is True.

    It is a lock of this thread: entering and leaving it runs no Python code, so that Ctrl-C cannot come in between and
    leave the mark set.
    """
    return _activity.replaying


class first_run:
    """Context manager that ends `recomputing` inside, for what runs once a step: the backward of a taped step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _activity.replaying = _activity.replaying, threading.RLock()

    def __exit__(self, *exc: Any) -> None:
        _activity.replaying = self._before


def stop_recomputing() -> None:
    """Clears every `recomputing` of this thread, after an exception that kept one from ending."""
    _activity.replaying = threading.RLock()


def current_counts() -> tuple[Counts, ...]:
    """Returns the counts that events on this thread are added to: the running plan's, if any, and the thread's own.

    To count in backward, take them in forward: backward may run on another thread.
    """
    return _activity.counts


class counting_to:
    """Context manager inside of which events are added to these counts."""

    __slots__ = ("_before", "_counts")

    def __init__(self, counts: tuple[Counts, ...]) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._before, _activity.counts = _activity.counts, self._counts

    def __exit__(self, *exc: Any) -> None:
        _activity.counts = self._before


class counting_for(counting_to):
    """Context manager inside of which events are added to a plan's counts as well."""

    __slots__ = ()

    def __init__(self, counts: Counts) -> None:
        here = _activity.counts
        super().__init__(here if counts in here else (counts, _activity.own))


def count(event: Event, counts: tuple[Counts, ...], number: int = 1) -> None:
    """Adds `number` events to each of these counts."""
    for each in counts:
        each.add(event, number)


def thread_log() -> StepLog:
    """Returns the counts of all forwards of this thread so far, and of their backwards, under any plan."""
    return _activity.own.log


def counters() -> tuple[int, int]:
    """Returns (regions replayed, saved tensors rebuilt) so far, of forwards of this thread."""
    log = thread_log()
    return log.num_replays, log.num_rederived


@contextlib.contextmanager
def in_tile() -> Iterator[None]:
    """Marks calls inside as parts of one call of the step, each run on a tile."""
    _activity.tiles += 1
    try:
        yield
    finally:
        _activity.tiles -= 1


def is_in_tile() -> bool:
    """Whether this thread runs a module on a tile: calls inside are not calls of the step."""
    return _activity.tiles > 0


def tile_counters() -> tuple[int, int]:
    """Returns (losses and modules run over tiles, tiled heads whose logits were computed whole) so far."""
    log = thread_log()
    return log.num_tiled, log.num_logits_made


def kept(tensor: torch.Tensor) -> None:
    """Notifies the observer, if any, that a saved tensor is kept."""
    observer = _activity.observer
    if observer is not None:
        observer.saved(tensor)


def rederived(tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
    """Notifies the observer, if any, that a saved tensor will be rebuilt."""
    if _activity.observer is not None:
        _activity.observer.rederived(tensor, sources)


def observer() -> Observer | None:
    """Returns this thread's observer of saved tensors; None if there is none."""
    return _activity.observer


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Has `observer` told what the engine does with every saved tensor."""
    before, _activity.observer = _activity.observer, observer
    try:
        yield
    finally:
        _activity.observer = before


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Marks steps inside as no training steps under a plan: recoup's own, for evidence, and plain ones."""
    before, _activity.is_unwatched = _activity.is_unwatched, True
    try:
        yield
    finally:
        _activity.is_unwatched = before


def is_unwatched() -> bool:
    """Whether the step that runs on this thread is no training step under a plan."""
    return _activity.is_unwatched


def stand_in_transport() -> Any:
    """Returns the transport that offload uses while a step is captured, None otherwise."""
    return _activity.stand_in


@contextlib.contextmanager
def moving_with(transport: Any) -> Iterator[None]:
    """Has offload use `transport`, whatever was asked for."""
    before, _activity.stand_in = _activity.stand_in, transport
    try:
        yield
    finally:
        _activity.stand_in = before


def auditor() -> Auditor | None:
    """Returns this thread's auditor of what regions save; None if nobody audits."""
    return _activity.auditor


@contextlib.contextmanager
def auditing(auditor: Auditor) -> Iterator[None]:
    """Has `auditor` keep what regions save, and compare."""
    before, _activity.auditor = _activity.auditor, auditor
    try:
        yield
    finally:
        _activity.auditor = before


@contextlib.contextmanager
def standing_for(device_type: str) -> Iterator[None]:
    """Has fake tensors on the CPU stand for tensors of another device type, for code that treats devices apart."""
    before, _activity.stands_for = _activity.stands_for, device_type
    try:
        yield
    finally:
        _activity.stands_for = before


def device_type(tensor: torch.Tensor) -> str:
    """Returns the type of the device that the tensor is on, or stands for while a step is captured."""
    return _activity.stands_for or tensor.device.type
