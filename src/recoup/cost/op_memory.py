"""Meters: the hidden workspace of an op run alone, by the allocator's own account, and its time.

An op's workspace is what the allocator handed out during the op at its highest, above what remains of it: oneDNN's and
cuDNN's convolution buffers, packed weights, reduction scratch. Its peak when run alone is its outputs plus that.

Time is the least of a few runs in this process, two if they agree, outputs allocated inside: what else the machine does
only adds to it, and would be counted several times over on a busy one. It is taken twice. Before each *cold* run the
caches are filled with something else: what a step saved, and runs again from, has left them by then, and so has much of
the code. *Warm* runs follow each other, as the ops of a small cell do (`reuse.py` says which is which). On one CPU
thread it is processor time, and a limit on measuring is one on processor time, so that a busy machine measures as many
ops as an idle one. With
glibc, blocks over the mmap threshold (up to 32 MiB, it adapts) go back to the system and are faulted in again by each
run, and so they are in training; under an allocator that keeps its memory they are not, and both are quicker. On CUDA
the time is from two events, the launches left out.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from recoup import _torch
from recoup.cost.reuse import last_cache_bytes
from recoup.thresholds import SAME_SHARE


class Run(NamedTuple):
    """A metered run: its number and, where a clock says anything (not on CUDA), its time as a first one."""

    number: int
    seconds: tuple[float, ...] = ()


class Timed(NamedTuple):
    """Seconds of an op with cold and with warm caches, and how far the median of cold runs lies above the least."""

    seconds: float
    warm_seconds: float
    spread_seconds: float


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


def time_call(
    call: Callable[[], Any],
    device: torch.device,
    *,
    limit_seconds: float,
    earlier: Sequence[float] = (),
    may_be_warm: bool = True,
) -> Timed:
    """Returns the least of 2 to 9 runs of each kind that together take about `limit_seconds`.

    One run has to be enough where it takes eight times the limit. The caller has run it once, to warm up.

    Args:
        earlier: seconds of runs before, which count with the cold ones; the clock of a CPU alone goes on from there.
        may_be_warm: if not, warm runs are not tried; nor are they on CUDA, where launches hide what differs.
    """
    if device.type == "cuda":
        seconds, spread_seconds = _time_on_cuda(call, device, limit_seconds)
        return Timed(seconds, seconds, spread_seconds)
    flush = torch.empty(last_cache_bytes(), dtype=torch.uint8)
    seconds, spread_seconds = _time_here(call, limit_seconds, list(earlier), before=lambda: flush.fill_(1))
    warm_seconds, _ = _time_here(call, limit_seconds, [], before=lambda: None) if may_be_warm else (seconds, 0.0)
    return Timed(seconds, min(warm_seconds, seconds), spread_seconds)


def _time_here(
    call: Callable[[], Any], limit_seconds: float, times: list[float], *, before: Callable[[], Any]
) -> tuple[float, float]:
    works, clock = work_clock(torch.device("cpu")), _cpu_clock()
    began = works()
    while _goes_on(times, works() - began, limit_seconds):
        before()
        start = clock()
        out = call()
        times.append(clock() - start)
        del out
    return _least(times)


def _time_on_cuda(call: Callable[[], Any], device: torch.device, limit_seconds: float) -> tuple[float, float]:
    """Times with CUDA events. The host runs ahead, so launches cost nothing, and the L2 cache is cold."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        out = call()
        host_seconds = time.perf_counter() - start
        del out
        properties = torch.cuda.get_device_properties(device)
        cache_bytes = int(properties.L2_cache_size)
        wait_cycles = int(2 * host_seconds * 1000 * properties.clock_rate)  # of kHz
        flush = torch.empty(2 * max(cache_bytes, 1 << 20), dtype=torch.uint8, device=device)
        times: list[float] = []
        began = time.perf_counter()
        while _goes_on(times, time.perf_counter() - began, limit_seconds):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            _torch.keep_gpu_busy(wait_cycles)
            flush.zero_()
            before.record()
            out = call()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
            del out
        return _least(times)


def _goes_on(times: list[float], seconds: float, limit_seconds: float) -> bool:
    """Whether to run once more: until the two fastest agree; if they do not, three to nine times within the limit."""
    if len(times) < 2:
        return not times or seconds <= 8 * limit_seconds
    least, next_to_it = sorted(times)[:2]
    if next_to_it <= least * (1 + 2 * SAME_SHARE) or seconds > 8 * limit_seconds:
        return False
    return len(times) < 3 or (len(times) < 9 and seconds < limit_seconds)


def _least(times: list[float]) -> tuple[float, float]:
    least = min(times)
    return least, statistics.median(times) - least
