"""Meters: the hidden workspace of an op run alone, by the allocator's own account, and its time.

An op's workspace is what the allocator handed out during the op at its highest, above what remains of it: oneDNN's and
cuDNN's convolution buffers, packed weights, reduction scratch. Its peak when run alone is its outputs plus that.

Time is the least of a few runs in this process, two if they agree, outputs allocated inside: what else the machine does
only adds to it, and would be counted several times over on a busy one. On a CPU it is taken twice, in rounds over a
batch of ops: before each round of *cold* runs the caches are filled with something else, since what a step saved, and
runs again from, has left them by then, and so has much of the code. *Warm* runs of one op follow each other, as the ops
of a small cell do (`reuse.py` says which is which). On one CPU thread it is processor time, and a limit on measuring is
one on processor time, so that a busy machine measures as many ops as an idle one. With
glibc, blocks over the mmap threshold (up to 32 MiB, it adapts) go back to the system and are faulted in again by each
run, and so they are in training; under an allocator that keeps its memory they are not, and both are quicker. On CUDA
the time is from two events, the launches left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from recoup import _torch
from recoup.cost.cache_capacity import flush_bytes
from recoup.cost.op_replay import Arena
from recoup.thresholds import NEGLIGIBLE_SHARE, SAME_SHARE

REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, MemoryError)
"""What an op raises that made-up data cannot satisfy, or that there is no room for."""


class Run(NamedTuple):
    """A metered run: its number and, where a clock says anything (not on CUDA), its time as a first one."""

    number: int
    seconds: tuple[float, ...] = ()


class Timed(NamedTuple):
    """Seconds of an op with cold and with warm caches, and how far the median of cold runs lies above the least.

    `is_rough`: it ran once, since even that is little of the step it was timed for.
    """

    seconds: float
    warm_seconds: float
    spread_seconds: float
    is_rough: bool = False


class Meter(Protocol):
    """Runs ops one after the other inside a `with` block; their allocations can be read after it."""

    def __enter__(self) -> Meter: ...

    def __exit__(self, *exc: Any) -> None: ...

    def run(self, call: Callable[[], Any]) -> Run:
        """Runs `call`, whose memory is known after the block."""
        ...

    def metered_bytes(self) -> list[tuple[int, int]]:
        """Returns (workspace bytes, bytes that remain allocated) of each run; call it after the `with` block."""
        ...


def make_meter(device: torch.device) -> Meter:
    """Returns the meter for a kind of device."""
    return _CudaMeter(device) if device.type == "cuda" else _CpuMeter()


class _CpuMeter:
    """Meters ops under one profiler; allocations of an odd size mark where each op's events begin and end."""

    _MARK_BYTES = 104729  # prime: no op allocates as many

    def __init__(self) -> None:
        self._profiler = _torch.MemoryProfiler()
        self._num_runs = 0

    def __enter__(self) -> _CpuMeter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._profiler.__exit__(*exc)  # type: ignore[no-untyped-call]

    def _mark(self) -> None:
        torch.empty(self._MARK_BYTES, dtype=torch.uint8)

    def run(self, call: Callable[[], Any]) -> Run:
        clock = _cpu_clock()
        self._num_runs += 1
        self._mark()
        try:
            began = clock()
            out = call()
            seconds = clock() - began
        finally:
            self._mark()
        del out
        return Run(self._num_runs - 1, (seconds,))

    def metered_bytes(self) -> list[tuple[int, int]]:
        changes = _torch.cpu_memory_events(self._profiler)
        found: list[tuple[int, int]] = []
        level = peak = position = 0
        inside = False
        while position < len(changes):
            change = changes[position]
            position += 1
            if change == self._MARK_BYTES and position < len(changes) and changes[position] == -self._MARK_BYTES:
                position += 1
                if inside:
                    found.append((max(peak - max(level, 0), 0), max(level, 0)))
                inside = not inside
                level = peak = 0
            elif inside:
                level += change
                peak = max(peak, level)
        return found


class _CudaMeter:
    """Meters ops by the caching allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: list[tuple[int, int]] = []

    def __enter__(self) -> _CudaMeter:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def run(self, call: Callable[[], Any]) -> Run:
        call()  # loads kernels, picks algorithms
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        out = call()
        torch.cuda.synchronize(self._device)
        remains = torch.cuda.memory_allocated(self._device) - before
        peak = int(torch.cuda.max_memory_allocated(self._device)) - before
        self._found.append((max(peak - remains, 0), remains))
        del out
        return Run(len(self._found) - 1)

    def metered_bytes(self) -> list[tuple[int, int]]:
        return self._found


def work_clock(device: torch.device) -> Callable[[], float]:
    """Returns the clock that limits of measuring are kept by; on a CPU it stands still while other programs run.

    So a busy machine measures the ops that an idle one does, and plans rest on the same kind of prices.
    """
    return time.perf_counter if device.type == "cuda" else time.thread_time


def _cpu_clock() -> Callable[[], float]:
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """A call that is to be timed.

    Attributes:
        call: has run once, to warm up.
        earlier: seconds of runs before, which count with the cold ones; the clock of a CPU alone goes on from there.
        may_be_warm: if not, warm runs are not tried; nor are they on CUDA, where launches hide what differs.
        touched_bytes: that a run reads and writes: what other ops find in the cache has left it after so many.
        num_calls: in the step.
    """

    call: Callable[[], Any]
    earlier: Sequence[float] = ()
    may_be_warm: bool = True
    touched_bytes: int = 0
    num_calls: int = 1

    def goes_on(
        self, times: Sequence[float], *, limit_seconds: float, step_seconds: float, waited_seconds: float = 0.0
    ) -> bool:
        """Whether to run once more: until the two fastest agree, or to the limit, which two runs may exceed.

        Args:
            step_seconds: of the whole step: runs agree that are within 2 %, or differ by next to nothing of it.
            waited_seconds: its share of what emptying the caches took.
        """
        seconds = sum(times)
        if len(times) < 2:
            return not times or seconds <= 8 * limit_seconds
        least, next_to_it = sorted(times)[:2]
        if next_to_it - least <= max(2 * SAME_SHARE * least, NEGLIGIBLE_SHARE * step_seconds / self.num_calls):
            return False
        return len(times) < 9 and seconds + waited_seconds < limit_seconds


def time_calls(
    timings: Sequence[Timing], arena: Arena, *, limit_seconds: float, step_seconds: float = 0.0
) -> list[Timed | None]:
    """Returns of each call the least of 2 to 9 runs of each kind, which together take about `limit_seconds`.

    One run has to be enough where it takes eight times the limit; and of the calls that are least of the step, which
    even by their first runs do not add up to what tells one step from another. No call may read what another one reads
    or writes: on a CPU they take turns. None is for a call that raises one of the `REFUSALS`, or there is no room to
    time it.

    Args:
        step_seconds: of the whole step, as far as it is known.
    """
    device = arena.device
    if device.type == "cuda":
        found: list[Timed | None] = [None] * len(timings)
        for index, timing in enumerate(timings):
            with contextlib.suppress(*REFUSALS):
                found[index] = _time_on_cuda(timing, device, limit_seconds, step_seconds)
        return found
    clock = _cpu_clock()
    cold: list[list[float]] = [list(timing.earlier) for timing in timings]
    warm: list[list[float]] = [[] for _ in timings]
    waited = [0.0] * len(timings)
    refused: set[int] = set()
    rough = _least_of([t.num_calls * min(t.earlier, default=math.inf) for t in timings], SAME_SHARE * step_seconds)

    def goes_on(index: int, times: list[float], waited_seconds: float = 0.0) -> bool:
        return index not in refused and timings[index].goes_on(
            times, limit_seconds=limit_seconds, step_seconds=step_seconds, waited_seconds=waited_seconds
        )

    def run(index: int, times: list[float]) -> Any:
        began = clock()
        try:
            out = timings[index].call()
        except REFUSALS:
            return refused.add(index)
        times.append(clock() - began)
        return out

    def is_left(index: int) -> bool:
        return index not in rough and goes_on(index, cold[index], waited[index])

    while left := list(filter(is_left, range(len(timings)))):
        began = clock()
        try:
            arena.touch(_beside_bytes([timings[index].touched_bytes for index in left], arena.cache_bytes))
        except REFUSALS:
            return [None] * len(timings)  # no room for it
        share = (clock() - began) / len(left)
        for index in left:
            waited[index] += share
        held = []  # until the round ends, what they return: the next one would write where it is still warm
        for index in left:
            out = run(index, cold[index])
            if len(left) > 1:
                held.append(out)
            del out
            if timings[index].may_be_warm and cold[index] and not is_left(index):
                warm[index].append(min(cold[index]))  # at the most, so that one run which agrees is enough
                while goes_on(index, warm[index]):
                    run(index, warm[index])
        del held
    return [
        None if index in refused else Timed(min(times), min([*warm[index], *times]), _spread(times), index in rough)
        for index, times in enumerate(cold)
    ]


def _least_of(seconds: Sequence[float], limit_seconds: float) -> set[int]:
    """Returns the positions of the smallest, as many as do not take more than the limit together."""
    found: set[int] = set()
    for index in sorted(range(len(seconds)), key=seconds.__getitem__):
        limit_seconds -= seconds[index]
        if limit_seconds < 0:
            break
        found.add(index)
    return found


def _beside_bytes(touched_bytes: Sequence[int], cache_bytes: int) -> int:
    """Returns what to touch before ops that take turns run once more, so that none finds what it read the last time.

    Args:
        touched_bytes: by each op.
    """
    return max(flush_bytes(cache_bytes) - (sum(touched_bytes) - max(touched_bytes)), 0)


def _time_on_cuda(timing: Timing, device: torch.device, limit_seconds: float, step_seconds: float) -> Timed:
    """Times with CUDA events. The host runs ahead, so launches cost nothing, and the L2 cache is cold."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        out = timing.call()
        host_seconds = time.perf_counter() - start
        del out
        properties = torch.cuda.get_device_properties(device)
        cache_bytes = int(properties.L2_cache_size)
        wait_cycles = int(2 * host_seconds * 1000 * properties.clock_rate)  # of kHz
        flush = torch.empty(2 * max(cache_bytes, 1 << 20), dtype=torch.uint8, device=device)
        times: list[float] = []
        while timing.goes_on(times, limit_seconds=limit_seconds, step_seconds=step_seconds):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            _torch.keep_gpu_busy(wait_cycles)
            flush.zero_()
            before.record()
            out = timing.call()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
            del out
        return Timed(min(times), min(times), _spread(times))


def _spread(times: list[float]) -> float:
    return statistics.median(times) - min(times)
