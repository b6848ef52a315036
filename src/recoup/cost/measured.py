"""Prices from the device itself: each distinct op run alone, timed, and its hidden workspace metered.

An op's workspace is what the allocator handed out during the op above what remains after it: oneDNN's and cuDNN's
convolution buffers, packed weights, reduction scratch. Times are medians of a few runs after one that warms up;
outputs are allocated inside, as in training. Views and ops that move little are not worth a run each: they cost one
op's host time. Results are kept on disk, by device, thread count and torch version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from recoup import _compat, progress
from recoup.cost.devices import DEVICES
from recoup.cost.model import PricedTrace, price_by_signature
from recoup.cost.replica import make_call
from recoup.cost.roofline import RooflineCost
from recoup.ir.trace import Signature, TensorSpec, Trace

SMALL_BYTES = 1 << 16
SMALL_OP_SECONDS = {"cpu": 4e-6, "cuda": 8e-6}
TOTAL_SECONDS = 25.0
_SECONDS_EACH = 0.04
_BATCH = 24
_CACHE_VERSION = 3
_EXTRA_BYTES = 1 << 14
_Prices = tuple[float, int, int]  # seconds, workspace bytes, bytes its output holds beyond what it shows


class MeasuredCost:
    """Prices ops by running them on `device`; what was measured before comes from disk."""

    def __init__(self, device: torch.device, *, cache: bool = True) -> None:
        self.device = device
        self.name = _device_name(device)
        self._path = _cache_path(self.name) if cache else None
        self._spent = 0.0
        self._known: dict[str, _Prices] = _load(self._path)

    def price(self, trace: Trace) -> PricedTrace:
        """Returns the priced trace; ops that could not be measured are scaled from the roofline, and that is said."""
        missing = [s for s in trace.signatures if not _is_small(s) and _key(s) not in self._known]
        missing.sort(key=lambda s: -(s.bytes_moved + s.flops // 50))
        began = time.perf_counter()
        changed = False
        with _quiet_random(self.device):
            for start in range(0, len(missing), _BATCH):
                if time.perf_counter() - began > TOTAL_SECONDS - self._spent:
                    break
                progress.advance(f"measuring ops on this device ({start} of {len(missing)})")
                found = _measure_batch(missing[start : start + _BATCH], self.device)
                self._known.update((_key(s), prices) for s, prices in found)
                changed = changed or bool(found)
        self._spent += time.perf_counter() - began
        if changed:
            _store(self._path, self._known)
        scale, roofline = self._scale(trace)
        unmeasured = 0

        def price(signature: Signature) -> tuple[float, int]:
            nonlocal unmeasured
            if signature.is_view:
                return 0.0, 0
            if _is_small(signature):
                return SMALL_OP_SECONDS[self.device.type], 0
            found = self._known.get(_key(signature))
            if found is None:
                unmeasured += 1
                return roofline.seconds(signature) * scale, 0
            return found[:2]

        priced = price_by_signature(self._with_real_sizes(trace), price, source=self._source(), is_estimate=False)
        if not unmeasured:
            return priced
        note = f"{priced.source} ({unmeasured} of {len(trace.signatures)} distinct ops scaled from a roofline)"
        return PricedTrace(
            trace=priced.trace,
            op_seconds=priced.op_seconds,
            op_workspace_bytes=priced.op_workspace_bytes,
            source=note,
            is_estimate=False,
        )

    def _with_real_sizes(self, trace: Trace) -> Trace:
        """Returns the trace with storages as large as the kernels really leave them.

        Some allocate more than their result needs and hand all of it out: `mse_loss` on a CPU leaves a scalar in a
        storage of its input's size.
        """
        larger: dict[int, int] = {}
        for op in trace.ops:
            signature = trace.signatures[op.signature]
            found = None if _is_small(signature) else self._known.get(_key(signature))
            if found is not None and found[2] and op.outputs:
                larger[op.outputs[0]] = found[2]
        if not larger:
            return trace
        storages = list(trace.storages)
        for index, extra_bytes in larger.items():
            storages[index] = dataclasses.replace(storages[index], nbytes=storages[index].nbytes + extra_bytes)
        return dataclasses.replace(trace, storages=tuple(storages))

    def _source(self) -> str:
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"measured on {self.name}{threads}, torch {torch.__version__}"

    def _scale(self, trace: Trace) -> tuple[float, RooflineCost]:
        roofline = RooflineCost(DEVICES["cpu-generic" if self.device.type == "cpu" else "a100-80gb"])
        ratios = [
            self._known[_key(s)][0] / roofline.seconds(s)
            for s in trace.signatures
            if not _is_small(s) and _key(s) in self._known and roofline.seconds(s) > 0
        ]
        return (statistics.median(ratios) if ratios else 1.0), roofline


def _is_small(signature: Signature) -> bool:
    return signature.is_view or signature.bytes_moved < SMALL_BYTES


def _measure_batch(signatures: Sequence[Signature], device: torch.device) -> list[tuple[Signature, _Prices]]:
    """Returns the prices of those signatures that can be run alone."""
    runs: list[tuple[Signature, float, int]] = []
    meter = _CudaMeter(device) if device.type == "cuda" else _CpuMeter()
    with meter:
        for signature in signatures:
            needed = _bytes_of((signature.args, signature.kwargs)) + 3 * signature.output_bytes
            if needed > _available_bytes(device) // 2:
                continue
            try:
                call = make_call(signature, device)
                if call is not None:
                    number = meter.run(call)
                    runs.append((signature, _time(call, device), number))
            except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                continue  # an op that made-up data cannot satisfy; the roofline prices it
    metered = meter.metered_bytes()
    found = []
    for signature, seconds, number in runs:
        workspace_bytes, remaining_bytes = metered[number]
        extra_bytes = max(remaining_bytes - signature.output_bytes, 0)
        # An allocator that rounds is no reason to call an output larger.
        found.append((signature, (seconds, workspace_bytes, extra_bytes if extra_bytes >= _EXTRA_BYTES else 0)))
    return found


class _CpuMeter:
    """Workspaces of ops run under one profiler; two odd allocations mark where each op's events begin and end."""

    _MARK = 104729

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._num_runs = 0

    def __enter__(self) -> _CpuMeter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        self._profiler.__exit__(*exc)  # type: ignore[no-untyped-call]

    def _mark(self) -> None:
        torch.empty(self._MARK, dtype=torch.uint8)

    def run(self, call: Callable[[], Any]) -> int:
        """Runs `call` under the meter and returns the run's number."""
        self._num_runs += 1
        self._mark()
        try:
            out = call()
        finally:
            self._mark()
        del out
        return self._num_runs - 1

    def metered_bytes(self) -> list[tuple[int, int]]:
        """Returns (workspace, what remains) of each run, once the meter was left."""
        changes = _compat.cpu_memory_events(self._profiler)
        found: list[tuple[int, int]] = []
        level = peak = position = 0
        inside = False
        while position < len(changes):
            change = changes[position]
            position += 1
            if change == self._MARK and position < len(changes) and changes[position] == -self._MARK:
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
    """Workspaces of ops by the caching allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: list[tuple[int, int]] = []

    def __enter__(self) -> _CudaMeter:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def run(self, call: Callable[[], Any]) -> int:
        """Runs `call` under the meter and returns the run's number."""
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
        return len(self._found) - 1

    def metered_bytes(self) -> list[tuple[int, int]]:
        """Returns (workspace, what remains) of each run."""
        return self._found


def _time(call: Callable[[], Any], device: torch.device) -> float:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 2 or (len(times) < 9 and time.perf_counter() - began < _SECONDS_EACH):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        out = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        del out
        if time.perf_counter() - began > 8 * _SECONDS_EACH:
            break
    return statistics.median(times)


def _bytes_of(nest: Any) -> int:
    if isinstance(nest, TensorSpec):
        size = 1
        for n in nest.shape:
            size *= n
        return int(size * getattr(torch, nest.dtype).itemsize)
    if isinstance(nest, (list, tuple)):
        return sum(_bytes_of(item) for item in nest)
    return 0


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def available_host_bytes() -> int:
    """Returns the host memory that is available now."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


@contextlib.contextmanager
def _quiet_random(device: torch.device) -> Iterator[None]:
    """Leaves the random streams as they were; ops are run outside autograd."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


# -- the cache on disk ------------------------------------------------------------------------------------------


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return "cpu " + line.partition(":")[2].strip()
    except OSError:
        pass
    return f"cpu {platform.processor() or platform.machine()}"


def _cache_path(name: str) -> Path:
    """Returns the file for this device; `RECOUP_CACHE_DIR` overrides the user's cache directory."""
    chosen = os.environ.get("RECOUP_CACHE_DIR")
    if chosen:
        root = Path(chosen)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recoup"
    text = f"{name}|{torch.get_num_threads()}|{torch.__version__}|{_CACHE_VERSION}"
    return root / f"ops-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _key(signature: Signature) -> str:
    return f"{signature.name}|{signature.args}|{signature.kwargs}"


def _load(path: Path | None) -> dict[str, _Prices]:
    if path is None:
        return {}
    try:
        return {k: (float(v[0]), int(v[1]), int(v[2])) for k, v in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, IndexError, AttributeError):
        return {}


def _store(path: Path | None, known: dict[str, _Prices]) -> None:
    """Writes the cache in one move; a directory that cannot be written to is no reason to fail."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(known, file)
        os.replace(temporary, path)
    except OSError:
        pass
