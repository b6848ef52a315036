"""State of the engine on this thread, for observers (capture, `verify`) and for users' own code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from recoup.runtime.step_log import Counts, Event, StepLog


class Observer(Protocol):
    """Is notified of each saved tensor: kept or rederived."""

    def saved(self, tensor: torch.Tensor) -> None:
        """The tensor is kept as it is."""

    def rederived(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """The tensor is not kept: it will be rebuilt from `sources`, which are."""


class Original(Protocol):
    """A tensor as a region's first forward saved it."""

    def compare(self, again: torch.Tensor, region: str) -> None:
        """Takes note of what the second forward saved in its place."""


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

    def __init__(self) -> None:
        self.replaying = threading.RLock()  # held while this thread runs something a second time, as often as it does
        self.own = Counts()
        self.counts: tuple[Counts, ...] = (self.own,)


_activity = _Activity()


def is_recomputing() -> bool:
    """Whether this thread runs something a second time: a region's replay or a rederived tensor.

    For counters and logs in a model's forward that must happen once a step. Raises nothing.

    Example:
        >>> recoup.is_recomputing()
        False
    """
    return _activity.replaying._is_owned()  # type: ignore[attr-defined,no-any-return]


def recomputing() -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that marks everything inside as a second run.

    A lock that no other thread sees: it is entered and left without Python, so that Ctrl-C cannot come in between and
    leave the mark behind.
    """
    return _activity.replaying


class first_run:
    """Context manager inside of `recomputing` for what runs once a step all the same: the backward of a taped step."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _activity.replaying = _activity.replaying, threading.RLock()

    def __exit__(self, *exc: Any) -> None:
        _activity.replaying = self._before


def stop_recomputing() -> None:
    """Has this thread run nothing a second time, whoever said so and was stopped before it could take it back."""
    _activity.replaying = threading.RLock()


def current_counts() -> tuple[Counts, ...]:
    """Returns the counts that events on this thread are added to: the running plan's, if any, and the thread's own.

    Who counts in backward keeps it from forward on: that may be another thread.
    """
    return _activity.counts


class counting_to:
    """Context manager that has everything inside counted to these counts."""

    __slots__ = ("_before", "_counts")

    def __init__(self, counts: tuple[Counts, ...]) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._before, _activity.counts = _activity.counts, self._counts

    def __exit__(self, *exc: Any) -> None:
        _activity.counts = self._before


class counting_for(counting_to):
    """Context manager that has everything inside counted to a plan's counts too."""

    __slots__ = ()

    def __init__(self, counts: Counts) -> None:
        here = _activity.counts
        super().__init__(here if counts in here else (counts, _activity.own))


def count(event: Event, counts: tuple[Counts, ...], number: int = 1) -> None:
    """Adds a number of events to all of these counts."""
    for each in counts:
        each.add(event, number)


def thread_log() -> StepLog:
    """Returns the counts of this thread's forwards so far, and of their backwards, under whatever plan."""
    return _activity.own.log


def counters() -> tuple[int, int]:
    """Returns how many regions of this thread's forwards were replayed and saved tensors rebuilt so far."""
    log = thread_log()
    return log.num_replays, log.num_rederived


@contextlib.contextmanager
def in_tile() -> Iterator[None]:
    """Marks everything inside as a part of one call, run on a tile of it."""
    _activity.tiles += 1
    try:
        yield
    finally:
        _activity.tiles -= 1


def is_in_tile() -> bool:
    """Whether this thread runs a module on a tile: the calls in it are not calls of the step."""
    return _activity.tiles > 0


def tile_counters() -> tuple[int, int]:
    """Returns how many losses and modules ran over tiles, and tiled heads' logits whole, by this thread's forwards."""
    log = thread_log()
    return log.num_tiled, log.num_logits_made


def kept(tensor: torch.Tensor) -> None:
    """Tells the observer, if there is one, that a saved tensor is kept as it is."""
    observer = _activity.observer
    if observer is not None:
        observer.saved(tensor)


def rederived(tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
    """Tells the observer, if there is one, that a saved tensor will be rebuilt."""
    if _activity.observer is not None:
        _activity.observer.rederived(tensor, sources)


def observer() -> Observer | None:
    """Returns this thread's observer of saved tensors, None if there is none."""
    return _activity.observer


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Has `observer` told what the engine does with every saved tensor."""
    before, _activity.observer = _activity.observer, observer
    try:
        yield
    finally:
        _activity.observer = before


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


def original(tensor: torch.Tensor) -> Original | None:
    """Returns the auditor's handle on a tensor that a region saves now, None if nobody audits."""
    return None if _activity.auditor is None else _activity.auditor.keep(tensor)


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
