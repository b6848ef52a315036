"""Bytes that a plan gives to scans: set around a call, read by `recoup.recurrent.scan`.

A scan is identified by the call whose own forward runs it and by its number among the scans of that call. Scans inside
of a scan's steps are not counted: they follow their own schedules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from recoup.runtime import execution_context
from recoup.runtime.step_log import Counts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOfScan:
    """Sizes of one step of a scan, by which its schedule is chosen.

    Attributes:
        num_steps: T.
        state_bytes: bytes of a held state.
        tape_bytes: bytes of a taped step.
        in_row_bytes: bytes of a taped step that another taped step follows.
        working_bytes: peak bytes of running a step beyond its tape.
        shared_bytes: further bytes where taped steps share a graph.
    """

    num_steps: int
    state_bytes: int
    tape_bytes: int
    in_row_bytes: int
    working_bytes: int
    shared_bytes: int

    @property
    def taped_bytes(self) -> int:
        """Bytes of all steps taped."""
        return (self.num_steps - 1) * self.in_row_bytes + self.tape_bytes


@runtime_checkable
class Recording(Protocol):
    """An observer that records ops, as the capture's does."""

    ops: list[Any]
    signatures: list[Any]


@dataclasses.dataclass(slots=True)
class ScanCounts:
    """Counts of the scans of one captured step.

    Attributes:
        num_evaluations: step evaluations of scans whose bytes a plan decided.
        num_tapes: tapes whose backward ran, one call of autograd's engine each.
        num_replayed: ops of steps that ran again, without views.
    """

    num_evaluations: int = 0
    num_tapes: int = 0
    num_replayed: int = 0
    recording: Recording | None = None


class Watcher(Protocol):
    """Is notified of the scans that a plan may decide about."""

    def begun(self, *, is_free: bool) -> None:
        """A scan begins in the current call; `is_free`: it has no schedule of its own."""

    def measured(self, found: StepOfScan) -> None:
        """Sizes of a step of that scan."""

    def ended(self) -> None:
        """Its first forward is over."""


class _Scans(threading.local):
    def __init__(self) -> None:
        self.calls: list[ScansIn] = []
        self.watcher: Watcher | None = None
        self.depth = 0
        self.num_free = 0
        self.counts: ScanCounts | None = None


_scans = _Scans()


class ScansIn:
    """Context around one call: bytes of its scans by number; scans without an entry are not limited."""

    __slots__ = ("_bytes_of", "_num_begun")

    def __init__(self, bytes_of: Mapping[int, int]) -> None:
        self._bytes_of = bytes_of
        self._num_begun = 0

    def __enter__(self) -> ScansIn:
        _scans.calls.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _scans.calls.pop()

    def next(self) -> int | None:
        """Returns the bytes of the scan that begins now; None if there are none."""
        self._num_begun += 1
        return self._bytes_of.get(self._num_begun - 1)


def ask(*, is_free: bool) -> int | None:
    """Returns the bytes of the scan that begins now; None: it follows its own schedule.

    Args:
        is_free: whether its caller left the schedule open; otherwise it keeps its schedule, and is counted.
    """
    if _scans.depth:
        return None
    found = [call.next() for call in reversed(_scans.calls)]  # the innermost call first
    _scans.num_free += is_free
    if _scans.watcher is not None:
        _scans.watcher.begun(is_free=is_free)
        return sys.maxsize if is_free else None  # every step is taped
    return next((each for each in found if each is not None), None) if is_free else None


def measured(step: StepOfScan) -> None:
    """Notifies the watcher, if any, of the sizes of a step of the scan that began."""
    if _scans.watcher is not None and _scans.depth == 1:
        _scans.watcher.measured(step)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Notifies `watcher` of every scan inside of the block, and has free scans tape every step."""
    before, _scans.watcher = _scans.watcher, watcher
    try:
        yield
    finally:
        _scans.watcher = before


@contextlib.contextmanager
def inside(*, is_first: bool = False) -> Iterator[None]:
    """Marks everything inside as steps of a scan.

    Args:
        is_first: whether this is the scan's first forward.
    """
    counts = _counts_of_capture() if not is_first and not _scans.depth else None
    begin = len(counts.recording.ops) if counts is not None and counts.recording is not None else 0
    _scans.depth += 1
    try:
        yield
    finally:
        _scans.depth -= 1
        if counts is not None and counts.recording is not None:
            signatures = counts.recording.signatures
            ran = counts.recording.ops[begin:]
            counts.num_replayed += sum(o.replayed and not signatures[o.signature].is_view for o in ran)
        if is_first and not _scans.depth and _scans.watcher is not None:
            _scans.watcher.ended()


def count_evaluations(number: int, counts: tuple[Counts, ...]) -> None:
    """Counts step evaluations of a scan whose bytes a plan decided.

    Args:
        counts: those of the thread that ran the scan's forward.
    """
    execution_context.count("num_scan_evaluations", counts, number)
    captured = _counts_of_capture()
    if captured is not None:
        captured.num_evaluations += number


def count_tape() -> None:
    """Counts one tape whose backward runs."""
    counts = _counts_of_capture()
    if counts is not None:
        counts.num_tapes += 1


@contextlib.contextmanager
def counting() -> Iterator[ScanCounts]:
    """Yields what holds, behind the block, the counts of the step that was captured in it, the last one."""
    found = ScanCounts()
    before, _scans.counts = _scans.counts, found
    try:
        yield found
    finally:
        _scans.counts = before


def _counts_of_capture() -> ScanCounts | None:
    """Returns the counts of the step that is captured; begins anew where another one is: one may be given up."""
    observer, counts = execution_context.observer(), _scans.counts
    if counts is None or not isinstance(observer, Recording):
        return None
    if counts.recording is not observer:
        counts.recording = observer
        counts.num_evaluations = counts.num_tapes = counts.num_replayed = 0
    return counts


def num_free() -> int:
    """Returns how many scans without a schedule of their own began on this thread so far."""
    return _scans.num_free
