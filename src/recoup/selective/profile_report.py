"""Measurements of `MemoryProfiler`: plain data, a table, JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from recoup.thresholds import ESTIMATE_SHARE
from recoup.units import MIB, format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer, over all its calls in a step.

    Attributes:
        path: dotted.
        kind: its class.
        activation_bytes: what autograd keeps of it, each storage counted once, for the layer that saves it first.
        freed_bytes: how much of that is not kept any more if the layer is recomputed (its inputs stay).
        peak_bytes: the step's level while its forward runs, at most.
        forward_seconds: median over the runs; 0 where nothing was run.
        forward_spread: half the distance between the quartiles, over the median.
        share: of all layers' activation bytes.
    """

    path: str
    kind: str
    activation_bytes: int
    freed_bytes: int
    peak_bytes: int
    forward_seconds: float
    forward_spread: float
    share: float

    @property
    def activation_mb(self) -> float:
        """The activations in MiB."""
        return self.activation_bytes / MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """Where a step's memory and time go, layer by layer.

    Attributes:
        layers: sorted by activation bytes, largest first; together they cover the model without overlap.
        total_activation_bytes: activation bytes of all layers, captured.
        measured_activation_bytes: mean of the total over the runs; None if nothing was run.
        activation_spread: (largest - smallest) / mean of the total over the runs; 0.02 is 2 %.
        parameter_bytes: bytes of the parameters.
        gradient_bytes: bytes of the gradients.
        buffer_bytes: bytes of the buffers.
        peak_bytes: measured peak of forward and backward; None if nothing was run.
        forward_peak_bytes: peak of the captured forward.
        backward_peak_bytes: peak of the captured backward.
        forward_seconds: median over the runs.
        backward_seconds: median over the runs.
        time_spread: half the distance between the quartiles over the median, of forward and backward together.
        snapshots: (label, bytes alive) after each layer's forward, then after forward and after backward.
        num_runs: number of steps that were run.
        device: device of the runs.
        num_recomputed_ops: ops of the step that ran a second time (a plan is in place, or other checkpointing).
    """

    layers: tuple[LayerProfile, ...]
    total_activation_bytes: int
    measured_activation_bytes: int | None
    activation_spread: float
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    peak_bytes: int | None
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_seconds: float
    backward_seconds: float
    time_spread: float
    snapshots: tuple[tuple[str, int], ...]
    num_runs: int
    num_recomputed_ops: int
    device: str

    @property
    def backward_ratio(self) -> float:
        """Backward's time over forward's; 0 where nothing was run."""
        return self.backward_seconds / self.forward_seconds if self.forward_seconds else 0.0

    def over(self, memory_mb: float) -> list[str]:
        """Returns the layers whose activations exceed that many MiB, and of which recomputing frees 5 % or more.

        A norm saves its input, which recomputing it would keep too.
        """
        return [
            r.path
            for r in self.layers
            if r.activation_mb > memory_mb and r.freed_bytes >= ESTIMATE_SHARE * r.activation_bytes
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "backward_ratio": self.backward_ratio}

    def table(self) -> str:
        """Returns the layers as a table that fits 100 columns."""
        width = max([len(_short(r.path)) for r in self.layers] + [5])
        lines = [f"{'layer':{width}}  {'kind':22}  {'activations':>11}  {'share':>6}  {'freed':>10}  {'forward':>9}"]
        for r in self.layers:
            lines.append(
                f"{_short(r.path):{width}}  {r.kind[:22]:22}  {format_bytes(r.activation_bytes):>11}  "
                f"{100 * r.share:5.1f}%  {format_bytes(r.freed_bytes):>10}  {format_seconds(r.forward_seconds):>9}"
            )
        lines.append(
            f"activations {format_bytes(self.total_activation_bytes)} (spread {100 * self.activation_spread:.1f} % "
            f"over {self.num_runs} runs), parameters {format_bytes(self.parameter_bytes)}, gradients "
            f"{format_bytes(self.gradient_bytes)}"
        )
        lines.append(
            f"peaks: forward {format_bytes(self.forward_peak_bytes)}, backward "
            f"{format_bytes(self.backward_peak_bytes)} (captured)"
            + (f", {format_bytes(self.peak_bytes)} measured" if self.peak_bytes is not None else "")
        )
        if self.forward_seconds:
            lines.append(
                f"time: forward {format_seconds(self.forward_seconds)}, backward "
                f"{format_seconds(self.backward_seconds)} ({self.backward_ratio:.1f} of forward), spread "
                f"{100 * self.time_spread:.0f} %"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _short(path: str) -> str:
    return path if len(path) <= 30 else "..." + path[-27:]
