"""The meter: peak memory of a step, everything counted, by the allocator's own events.

On a CPU every allocation and release passes the profiler; the peak is the running maximum of its events, plus what the
model, its gradients, the optimizer and the batch held before. On CUDA it is `max_memory_allocated`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from recoup import _torch
from recoup._storages import covered_bytes


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of storage that the tensors cover, each byte once; a slice counts as the slice."""
    return covered_bytes(tensors)


def measure_peak(step: Callable[[], Any], *, device: torch.device, held_bytes: int) -> int:
    """Runs `step` once and returns the peak in bytes.

    Args:
        device: where the step runs.
        held_bytes: storages that are there before and stay (CPU only; CUDA counts everything that is allocated on the
            device).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return peak_on_cuda(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _torch.MemoryProfiler() as profiler:
            step()
    level = peak = 0
    for change in _torch.cpu_memory_events(profiler):
        level += change
        peak = max(peak, level)
    return held_bytes + peak


def peak_on_cuda(device: torch.device) -> int:
    """Returns the peak bytes since the last reset, with blocks that are freed but that another stream still reads."""
    stats = torch.cuda.memory_stats(device)
    return max(int(stats["allocated_bytes.all.peak"]), int(stats["active_bytes.all.peak"]))


def meter_name(device: torch.device) -> str:
    """Returns in words how `measure_peak` measures there."""
    if device.type == "cuda":
        return f"allocated and active bytes on {torch.cuda.get_device_name(device)}"
    return "allocator events of torch.profiler on the CPU"


def release_unused(device: torch.device) -> None:
    """Returns torch's unused memory to the card, so that one step's fragments do not burden the next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
