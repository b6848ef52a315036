"""Measures one step of a training loop that is not ours: started in one callback, stopped in another."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.evidence.memory import peak_on_cuda, storage_bytes
from recoup.runtime import execution_context
from recoup.runtime.step_log import StepLog


class StepMeter:
    """Measurement of one step.

    Attributes:
        peak_bytes: peak of the step; None before a step was measured.
        num_replays: regions that the step replayed.
        num_rederived: saved tensors that the step rebuilt.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self.num_replays = 0
        self.num_rederived = 0
        self._profiler: Any = None
        self._held_bytes = 0
        self._before = StepLog()
        self._device = torch.device("cpu")

    @property
    def is_running(self) -> bool:
        """Whether a step is being measured."""
        return self._profiler is not None

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any = None) -> None:
        """Starts measuring; tensors that exist now (weights, gradients, optimizer state, `batch`) count as held."""
        self._device = next(model.parameters()).device
        self._before = execution_context.thread_log()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._profiler = True
            return
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        state = [dict(s) for s in optimizer.state.values()] if optimizer is not None else []
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self._held_bytes = storage_bytes(
            [*model.parameters(), *model.buffers(), *grads, *iterate_tensors([batch, state])]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler = _torch.MemoryProfiler()
            self._profiler.__enter__()

    def stop(self) -> None:
        """Stops measuring and sets `peak_bytes`."""
        if self._device.type == "cuda":
            self.peak_bytes = peak_on_cuda(self._device)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._profiler.__exit__(None, None, None)
            level = peak = 0
            for change in _torch.cpu_memory_events(self._profiler):
                level += change
                peak = max(peak, level)
            self.peak_bytes = self._held_bytes + peak
        self._profiler = None
        ran = execution_context.thread_log() - self._before
        self.num_replays, self.num_rederived = ran.num_replays, ran.num_rederived
