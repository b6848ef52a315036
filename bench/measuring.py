"""One meter for every method: peak bytes, FLOPs, gradients, and time beside plain's in the same minutes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from recoup.evidence.gradients import StepResult, compare
from recoup.evidence.memory import measure_peak
from recoup.evidence.step_bench import StepBench

NUM_SETTLING = 5  # steps until a plan follows the program of the one before, in all but the 2**n-th that follow
_NUM_TIMED = 3  # steps, of which the fastest is a turn's timing
_NUM_BETWEEN = 3  # ways between two turns of the one that they are compared with

Enter = Callable[[], contextlib.AbstractContextManager[Any]]
Shapes = dict[tuple[str, str], int]


_aten = torch.ops.aten
# torch counts the attention of GPUs alone, as of 2.13.
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
}


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter of FLOPs of products, convolutions and attention, that of a CPU included."""
    return FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)


class _FlopsByShape(TorchDispatchMode):
    """Notes what each distinct op of a step is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Shapes = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in _CPU_ATTENTION or packet in flop_registry:
            shapes = [list(a.shape) if isinstance(a, torch.Tensor) else [] for a in args]
            if packet in _CPU_ATTENTION:
                flops = _CPU_ATTENTION[packet](*filter(None, shapes[:4]))
            else:
                flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self.found[_key(f"aten::{packet.__name__}", shapes)] = int(flops)
        return out


def _key(name: str, shapes: Any) -> tuple[str, str]:
    return name, str([list(s) for s in shapes if s])


def flops_by_shape(bench: StepBench) -> Shapes:
    """Returns the FLOPs of each distinct op of the plain step."""
    bench.restore()
    with _FlopsByShape() as mode:
        bench.step()
    return mode.found


def _compiled_flops(bench: StepBench, known: Shapes) -> int:
    """Runs a step and counts its FLOPs from the profiler's record of ops and shapes.

    torch leaves compiled code aside while a dispatch mode is on, so a counter would see the step as eager runs it. Ops
    that the plain step does not have are looked up by their shapes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
            bench.step()
    total = 0
    for event in record.events():
        key = _key(event.name, event.input_shapes)
        if key in known:
            total += known[key]
        elif event.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            packet = getattr(torch.ops.aten, event.name.removeprefix("aten::"))
            total += int(flop_registry[packet](*(s for s in event.input_shapes if s)))
    return total


def to_host(result: StepResult | None) -> StepResult:
    """Returns the result with its tensors in host memory, where they do not count in a device's peak."""
    assert result is not None
    return dataclasses.replace(
        result,
        loss=result.loss.cpu(),
        gradients={name: None if g is None else g.cpu() for name, g in result.gradients.items()},
        buffers={name: b.cpu() for name, b in result.buffers.items()},
    )


def metered(
    bench: StepBench, enter: Enter, reference: StepResult | None, known: Shapes, *, compiled: bool = False
) -> dict[str, Any]:
    """Returns peak bytes, FLOPs (matmul, convolution, attention) and the difference to the reference step."""
    row: dict[str, Any] = {}

    def fresh() -> None:
        bench.restore()  # before the method comes in: it would put back what the method changed

    fresh()
    with enter():
        result = bench.step(take=True)  # also allocates or compiles what only a first step does
    if reference is not None:
        comparison = compare(reference, to_host(result))
        # Hooks that a method put in place are its own, and no change to the model.
        differences = [d for d in comparison.differences if "_hooks" not in d]
        row["exact"] = not differences
        row["gradient_error"] = comparison.max_gradient_error
        if differences:
            row["difference"] = differences[0]
    del result
    fresh()
    if compiled:
        with enter():
            row["flops"] = _compiled_flops(bench, known)
    else:
        with enter(), flop_counter() as counter:
            bench.step()
        row["flops"] = int(counter.get_total_flops())
    fresh()
    with enter():
        row["peak_bytes"] = measure_peak(bench.step, device=bench.device, held_bytes=bench.held_bytes())
    bench.restore()
    return row


def timed(bench: StepBench, ways: dict[str, Enter], *, rounds: int) -> dict[str, dict[str, float]]:
    """Times the ways in turn, `rounds` times, in CPU time on a CPU; the first is what the others are compared with.

    Each turn enters a way anew, lets it settle, and times the steps after: the state that a training is in. The first
    way's turns stand before and after every few others, so that a machine whose speed drifts is compared with itself.

    Returns:
        For each way the median of its ratios to the first way's turns around it, half the distance between their
        quartiles, and the median seconds.
    """
    first, *others = ways
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        before = _turn(bench, ways[first])
        for turn in range(rounds):
            order = others if turn % 2 else others[::-1]
            for start in range(0, max(len(order), 1), _NUM_BETWEEN):
                mine = {name: _turn(bench, ways[name]) for name in order[start : start + _NUM_BETWEEN]}
                after = _turn(bench, ways[first])
                base = (before + after) / 2
                for name, found in {**mine, first: base}.items():
                    seconds[name].append(found)
                    ratios[name].append(found / base)
                before = after
            gc.collect(0)
    finally:
        gc.enable()
    bench.restore()
    return {name: _middle(sorted(ratios[name])) | {"seconds": statistics.median(seconds[name])} for name in ways}


def _middle(ratios: list[float]) -> dict[str, float]:
    quarter = len(ratios) // 4
    spread = (ratios[-1 - quarter] - ratios[quarter]) / 2
    return {"time_ratio": statistics.median(ratios), "time_spread": spread}


def _turn(bench: StepBench, enter: Enter) -> float:
    """Returns the seconds of one step of a way that has settled: the fastest of some, as what disturbs only adds."""
    cuda = bench.device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    found = []
    bench.restore()
    with enter():
        for _ in range(NUM_SETTLING):
            bench.step()
        for _ in range(_NUM_TIMED):
            if cuda:
                torch.cuda.synchronize()
            begun = clock()
            bench.step()
            if cuda:
                torch.cuda.synchronize()
            found.append(clock() - begun)
    return min(found)
