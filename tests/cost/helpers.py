"""Real steps followed op by op, independent of the capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from recoup import _torch
from recoup.cost.signature import make_signature
from recoup.ir.trace import Op, Signature, Trace


def signature_of(func: Any, *args: Any, **kwargs: Any) -> Signature:
    """Runs an op and returns its signature."""
    return make_signature(func, args, kwargs, func(*args, **kwargs))


def trace_of(signatures: list[Signature]) -> Trace:
    """Returns a trace of these ops, one after the other, without storages."""
    ops = tuple(
        Op(signature=i, call=-1, origin=-1, phase="forward", replayed=False, inputs=(), outputs=())
        for i in range(len(signatures))
    )
    return Trace(
        source="fake",
        reason="",
        device="cpu",
        fingerprint="",
        model_class="",
        num_parameters=0,
        grad_mode_default_loss="",
        signatures=tuple(signatures),
        ops=ops,
        storages=(),
        calls=(),
    )


def tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a nest."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from tensors(item)


def record(step: Callable[[], None]) -> tuple[list[Signature], list[int]]:
    """Returns the ops of a step, and the bytes that lived beside each, above what was there before the step."""
    signatures: list[Signature] = []
    levels: list[int] = []
    live: dict[int, int] = {}
    seen_before: set[int] = set()

    class Recorder(_torch.dispatch_mode_class()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            for t in tensors((args, tuple(kwargs.values()))):
                key = t.untyped_storage()._cdata
                if key not in live:
                    seen_before.add(key)
            out = func(*args, **kwargs)
            for t in tensors(out):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in live and key not in seen_before:
                    live[key] = storage.nbytes()
                    weakref.finalize(storage, live.pop, key, None)
            signatures.append(make_signature(func, args, kwargs, out))
            levels.append(sum(live.values()))
            return out

    with Recorder():
        step()
    return signatures, levels


def measured_peak_bytes(run: Callable[[], Any]) -> tuple[int, int]:
    """Returns (peak, what is left while the result lives) of the CPU allocator, above the level before the run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
        torch.empty(104729, dtype=torch.uint8)
        del result
    level = peak = 0
    for change in _torch.cpu_memory_events(profiler):
        if change == 104729:
            break
        level += change
        peak = max(peak, level)
    return peak, level
