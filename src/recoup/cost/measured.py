"""Prices from the device itself: each distinct op run alone, timed, and its hidden workspace metered.

One run under the meter, which also warms up, then a few timed ones; what the figures mean is in `op_memory.py`.
An op of a trace costs what it takes with cold or with warm caches, by what it reads (`reuse.py`).
Views cost nothing; ops that move little are not worth a run each: they cost one op's host time, and their workspace,
which is as little, is not counted. The largest ops come first, within a limit of time; ops that were not reached, or
that made-up data cannot satisfy, are priced by a roofline scaled to what was measured, and the source says how many.
Results are kept on disk (`cache.py`), so what was left out for lack of time is measured when it is asked for again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recoup import _torch, progress
from recoup._allocation import available_bytes, is_allocation_failure
from recoup.cost import cache as disk
from recoup.cost.apart import Request, measure_apart
from recoup.cost.cache import Measurement
from recoup.cost.cache_capacity import cache_capacity_bytes, flush_bytes
from recoup.cost.devices import DEVICES
from recoup.cost.flops import kind, op_name
from recoup.cost.hidden_memory import LOSSES
from recoup.cost.host_costs import TYPICAL, HostCosts
from recoup.cost.kernel_flags import KernelFlags
from recoup.cost.model import CostModel, PricedTrace
from recoup.cost.op_memory import REFUSALS, Run, Timing, make_meter, time_calls, work_clock
from recoup.cost.op_replay import Arena, argument_bytes, make_call
from recoup.cost.reuse import cold_shares, interpreter_coldness, may_be_warm
from recoup.cost.roofline import RooflineCost
from recoup.ir.trace import Signature, Trace
from recoup.thresholds import MEASURING_SECONDS, SAME_SHARE, SMALL_BYTES

SMALL_OP_SECONDS = {"cpu": 4e-6, "cuda": 8e-6}
_SECONDS_EACH = 0.03  # for the runs of one op, of which the fastest counts
_BATCH_OPS = 128  # metered in one profiler run, and timed in turn


class MeasuredCost(CostModel):
    """Prices ops by running them on `device`; what was measured before comes from disk."""

    def __init__(self, device: torch.device, *, cache: bool = True, host_costs: HostCosts = TYPICAL) -> None:
        self.device = device
        self.host_costs = host_costs
        self.name = device_name(device)
        self._flags = KernelFlags.current()
        threads, flags = torch.get_num_threads(), str(self._flags)
        path = disk.cache_path(self.name, threads=threads, torch_version=torch.__version__, flags=flags)
        self._path = path if cache else None
        self._spent_seconds = 0.0
        self._step_seconds = 0.0  # of the longest step that was priced: what prices of its parts have to be exact to
        self._failure = ""
        self._known = disk.load(self._path)
        self._arena: Arena | None = None

    @functools.cached_property
    def _cache_bytes(self) -> int:
        return cache_capacity_bytes(disk.capacity_path(self.name) if self._path else None)

    def rest(self) -> None:
        """Gives back the memory that ops were run in."""
        self._arena = None

    def price(self, trace: Trace) -> PricedTrace:
        """Returns the priced trace. Ops that were not measured are scaled from the roofline, and `source` says so."""
        self._measure(trace.signatures, collections.Counter(op.signature for op in trace.ops))
        scale, roofline = self._scale(trace)
        unmeasured = 0

        def price(signature: Signature) -> tuple[float, float, int]:
            """Returns seconds with cold caches, with warm ones, and workspace bytes."""
            nonlocal unmeasured
            if signature.is_view:
                return 0.0, 0.0, 0
            if _is_small(signature):
                return SMALL_OP_SECONDS[self.device.type], SMALL_OP_SECONDS[self.device.type], 0
            found = self._known.get(_key(signature))
            if found is None:
                unmeasured += 1
                seconds = roofline.seconds(signature) * scale
                return seconds, seconds, 0
            return found.seconds, found.warm_seconds, found.workspace_bytes

        trace = self._with_real_sizes(trace)
        prices = [price(signature) for signature in trace.signatures]
        is_cpu = self.device.type == "cpu"
        cold = cold_shares(trace, self._cache_bytes) if is_cpu else [1.0] * len(trace.ops)
        priced = PricedTrace(
            trace=trace,
            op_seconds=tuple(
                prices[op.signature][1] + share * (prices[op.signature][0] - prices[op.signature][1])
                for op, share in zip(trace.ops, cold, strict=True)
            ),
            op_workspace_bytes=tuple(prices[op.signature][2] for op in trace.ops),
            source=self._source(),
            is_estimate=False,
            host_costs=self.host_costs.among(interpreter_coldness(trace)) if is_cpu else self.host_costs,
        )
        if not unmeasured:
            return priced
        note = f"{priced.source} ({unmeasured} of {len(trace.signatures)} distinct ops scaled from a roofline)"
        if self._failure:
            note += f"; {self._failure}"
        return dataclasses.replace(priced, source=note)

    def _with_real_sizes(self, trace: Trace) -> Trace:
        """Returns the trace with storages as large as the kernels really leave them.

        Some allocate more than their result needs and hand all of it out: `mse_loss` on a CPU leaves a scalar in a
        storage of its input's size. A real step has them as they are.
        """
        if trace.source == "real":
            return trace
        larger: dict[int, int] = {}
        for op in trace.ops:
            signature = trace.signatures[op.signature]
            found = None if _is_small(signature) else self.measurement(signature)
            if found is not None and found.extra_output_bytes and op.outputs:
                # A workspace for backward whose size only the kernel knows is captured as an empty tensor.
                empty = (i for i in op.outputs if not trace.storages[i].nbytes)
                larger[next(empty, op.outputs[0])] = found.extra_output_bytes
        if not larger:
            return trace
        storages = list(trace.storages)
        for index, extra_bytes in larger.items():
            storages[index] = dataclasses.replace(storages[index], nbytes=storages[index].nbytes + extra_bytes)
        return dataclasses.replace(trace, storages=tuple(storages))

    def measured(self, signatures: Sequence[Signature]) -> list[Measurement | None]:
        """Returns the measurement of each op, run now unless it is known; None for small ones and what cannot run."""
        self._measure(signatures, {})
        return [None if _is_small(s) else self.measurement(s) for s in signatures]

    def measurement(self, signature: Signature) -> Measurement | None:
        """Returns the measurement of an op on this device, None if it was not run."""
        return self._known.get(_key(signature))

    def _measure(self, signatures: Sequence[Signature], num_calls: Mapping[int, int]) -> None:
        """Measures what is not known, what may take longest in the step first, until the time is up.

        Args:
            num_calls: in the step, of each op by its position; once where it is not said.
        """
        calls: collections.Counter[Signature] = collections.Counter()
        for index, signature in enumerate(signatures):
            if not _is_small(signature):
                calls[signature] += num_calls.get(index, 1)
        self._step_seconds = step_seconds = max(self._step_seconds, self._seconds(calls))
        missing = [s for s in calls if _key(s) not in self._known or self._is_too_rough(s, calls[s], step_seconds)]
        missing.sort(key=lambda s: -(s.bytes_moved + s.flops // 50))
        limit_seconds = MEASURING_SECONDS - self._spent_seconds
        new: dict[str, Measurement | None] = {}
        if not missing or limit_seconds <= 0:
            return
        clock = work_clock(self.device)
        began = clock()
        try:
            if self.device.type == "cuda":
                self._measure_apart(missing, limit_seconds, new)
            else:
                self._measure_here(missing, calls, began + limit_seconds, new)
        finally:
            self._spent_seconds += clock() - began
            self._known |= new
            self._step_seconds = max(self._step_seconds, self._seconds(calls))
            if new:
                disk.store(self._path, new, device_name=self.name, torch_version=torch.__version__)

    def _seconds(self, calls: Mapping[Signature, int]) -> float:
        """Returns what so many calls of each op take, of those that were measured."""
        return sum(num_calls * found.seconds for s, num_calls in calls.items() if (found := self.measurement(s)))

    def _is_too_rough(self, signature: Signature, num_calls: int, step_seconds: float) -> bool:
        """Whether an op ran once, for a step of which it was less than it is of this one."""
        found = self.measurement(signature)
        return found is not None and found.is_rough and num_calls * found.seconds > SAME_SHARE * step_seconds

    def _measure_here(
        self,
        missing: list[Signature],
        calls: Mapping[Signature, int],
        deadline: float,
        new: dict[str, Measurement | None],
    ) -> None:
        """Measures in this process; an op as exactly as the step that was measured so far can tell."""
        if self._arena is None:
            # Two of it are touched, and up to four are ops' arguments: the meter needs some of what there is too.
            room_bytes = available_bytes(self.device) // 16
            self._arena = Arena(self.device, cache_bytes=min(self._cache_bytes, room_bytes))
        arena = self._arena
        remaining = progress.Remaining(len(missing))
        known_seconds = self._seconds({s: calls[s] for s in calls.keys() - set(missing)})
        with alone(self.device):
            done = 0
            for batch in _batches(missing, 2 * flush_bytes(arena.cache_bytes)):
                if work_clock(self.device)() > deadline:
                    break
                progress.advance(f"measuring ops on this device ({remaining.text(done, done=done)})")
                measured = measure_ops(
                    batch,
                    arena,
                    deadline,
                    num_calls=calls,
                    known_seconds=known_seconds,
                    least_seconds=self._step_seconds,
                )
                known_seconds += sum(calls[s] * timed.seconds for s in batch if (timed := measured.get(_key(s))))
                new |= measured
                done += len(batch)

    def _measure_apart(self, missing: list[Signature], seconds: float, new: dict[str, Measurement | None]) -> None:
        """Measures in another process: what breaks a CUDA context must not break the caller's."""
        request = Request(device=str(self.device), flags=self._flags, signatures=tuple(missing), seconds=seconds)
        remaining = progress.Remaining(len(missing))
        found = measure_apart(
            request,
            advance=lambda at: progress.advance(f"measuring ops on this device ({remaining.text(at, done=at)})"),
        )
        for position, measured in found.measured.items():
            new[_key(missing[position])] = measured
        for position in found.deadly:
            new[_key(missing[position])] = None
        if found.deadly:
            names = ", ".join(dict.fromkeys(missing[position].name for position in found.deadly))
            self._failure = f"run alone, {names} ended the process"
        if found.failure:
            self._failure = f"ops could not be measured: {found.failure}"

    def _source(self) -> str:
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"measured on {self.name}{threads}, torch {torch.__version__}"

    def _scale(self, trace: Trace) -> tuple[float, RooflineCost]:
        roofline = RooflineCost(DEVICES["cpu-generic" if self.device.type == "cpu" else "a100-80gb"])
        ratios = []
        for signature in trace.signatures:
            found = None if _is_small(signature) else self.measurement(signature)
            expected = roofline.seconds(signature)
            if found is not None and expected > 0:
                ratios.append(found.seconds / expected)
        return (statistics.median(ratios) if ratios else 1.0), roofline


def _is_small(signature: Signature) -> bool:
    # Products and convolutions are run whatever their size: the workspace of a small one is larger than itself. So is
    # what a loss leaves behind its scalar: a list of them keeps as much as their inputs take.
    is_light = kind(signature.name) == "other" and op_name(signature.name) not in LOSSES
    return signature.is_view or (is_light and signature.bytes_moved < SMALL_BYTES)


def _batches(signatures: Sequence[Signature], most_bytes: int) -> Iterator[list[Signature]]:
    """Yields the ops in order: one, or as many as do not touch more than so many bytes together."""
    batch: list[Signature] = []
    num_bytes = 0
    for signature in signatures:
        needed_bytes = argument_bytes(signature) + signature.output_bytes
        if batch and (num_bytes + needed_bytes > most_bytes or len(batch) == _BATCH_OPS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(signature)
        num_bytes += needed_bytes
    if batch:
        yield batch


def measure_ops(
    signatures: Sequence[Signature],
    arena: Arena,
    deadline: float,
    *,
    num_calls: Mapping[Signature, int] | None = None,
    known_seconds: float = 0.0,
    least_seconds: float = 0.0,
) -> dict[str, Measurement | None]:
    """Returns measurements by key, None for ops that cannot run alone; ops after the deadline are missing.

    Args:
        num_calls: in the step that is to be priced; an op is run no more often than the step's seconds can tell.
        known_seconds: of the step's ops that are not among these.
        least_seconds: that the step takes in any case.
    """
    device = arena.device
    refused: dict[str, Measurement | None] = {}
    metered: list[tuple[Signature, Callable[[], Any], Run]] = []
    clock = work_clock(device)
    room_bytes = available_bytes(device) + arena.num_bytes
    # Its arguments, what it returns, and as much to work in.
    fitting = [s for s in signatures if argument_bytes(s) + 2 * s.output_bytes <= room_bytes]
    try:
        arena.clear(sum(argument_bytes(s) for s in fitting))
    except REFUSALS as error:
        if is_allocation_failure(error):
            return {}
        raise
    with make_meter(device) as meter:
        for signature in fitting:
            if clock() > deadline:
                break
            try:
                call = make_call(signature, device, arena)
                if call is None:
                    refused[_key(signature)] = None
                    continue
                metered.append((signature, call, meter.run(call)))
            except REFUSALS as error:
                if is_allocation_failure(error):
                    continue  # there may be room for it another time
                refused[_key(signature)] = None  # made-up data cannot satisfy it
        calls = num_calls or {}
        these_seconds = sum(calls.get(signature, 0) * min(run.seconds, default=0.0) for signature, _, run in metered)
        timings = [
            Timing(
                call,
                earlier=run.seconds,
                may_be_warm=may_be_warm(signature, arena.cache_bytes),
                touched_bytes=min(signature.bytes_moved, argument_bytes(signature) + signature.output_bytes),
                num_calls=calls.get(signature, 1),
            )
            for signature, call, run in metered
        ]
        # Under the meter still: what it adds to an op is about what autograd and a module's call add in a step.
        timed = time_calls(
            timings,
            arena,
            limit_seconds=_SECONDS_EACH,
            step_seconds=max(known_seconds + these_seconds, least_seconds),
        )
    found: dict[str, Measurement | None] = {}
    nbytes = meter.metered_bytes()
    for (signature, _, run), times in zip(metered, timed, strict=True):
        if times is None:
            continue  # it ran once: there may be room for it another time
        workspace_bytes, remaining_bytes = nbytes[run.number]
        extra_bytes = max(remaining_bytes - signature.output_bytes, 0)
        found[_key(signature)] = Measurement(
            seconds=times.seconds,
            warm_seconds=times.warm_seconds,
            spread_seconds=times.spread_seconds,
            workspace_bytes=workspace_bytes,
            # That CUDA's allocator rounds is no reason to call an output larger.
            extra_output_bytes=extra_bytes if device.type == "cpu" or extra_bytes >= SMALL_BYTES else 0,
            is_rough=times.is_rough,
        )
    return refused | found


@contextlib.contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Runs ops outside of the caller's dispatch modes and autocast, and restores the random streams afterwards."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        # With gradients on, as in a forward: kernels that keep a workspace for backward (oneDNN's LSTM) ask for it.
        # The arguments need none, so no graph is made.
        with _torch.without_dispatch_modes(), _torch.below_autocast_and_autograd(), torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def device_name(device: torch.device) -> str:
    """Returns what the device is called: a card's name, a CPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return "cpu " + line.partition(":")[2].strip()
    except OSError:
        pass
    return f"cpu {platform.processor() or platform.machine()}"


def _key(signature: Signature) -> str:
    return f"{signature.name}|{signature.args}|{signature.kwargs}"
