"""The three gates: memory, profile, gradients; what `recoup validate` and the generated tests run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recoup.capture.step import Objective
from recoup.errors import UsageError
from recoup.selective.profile_report import ProfileReport
from recoup.selective.trial import Trial, Trials
from recoup.thresholds import ESTIMATE_SHARE
from recoup.units import format_bytes

STRATEGIES = ("full", "selective", "sequential", "budget")
SAVED_SHARE = 0.30  # of the plain peak that checkpointing must free to pass
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate: its name, whether it held, and the numbers in words."""

    name: str
    ok: bool
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All gates of one model."""

    model_class: str
    gates: tuple[Gate, ...]

    @property
    def ok(self) -> bool:
        """Whether every gate held."""
        return all(gate.ok for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"Gates of activation checkpointing on {self.model_class}"]
        lines += [f"  {'pass' if gate.ok else 'FAIL'}  {gate.name:22} {gate.text}" for gate in self.gates]
        num_failed = sum(1 for gate in self.gates if not gate.ok)
        lines.append("ok: every gate held" if self.ok else f"failed: {num_failed} of {len(self.gates)} gates")
        return "\n".join(lines)


def validate(
    model: nn.Module,
    batch: Any,
    *,
    objective: Objective = Objective(),
    strategies: Sequence[str] = STRATEGIES,
) -> Validation:
    """Runs the gates; nothing of the model changes.

    Args:
        strategies: of `recoup.selective.trial.TRIED`. "budget" is the peak of "full", or the smallest reachable;
            "selective" draws its line at half of what a layer keeps on average.

    Raises:
        UsageError, StepError, ConflictError: as `recoup.plan`.
    """
    if not strategies:
        raise UsageError("validate needs at least one strategy.")
    trials = Trials(model, batch, objective=objective)
    runs = [trials.run(strategy) for strategy in strategies]
    gates = [check_memory(runs), *check_profile(trials.report())]
    gates += [check_gradients(run, model) for run in runs]
    return Validation(model_class=type(model).__name__, gates=tuple(gates))


def check_memory(runs: Sequence[Trial]) -> Gate:
    """Returns whether the leanest of the strategies takes 30 % off the measured peak of forward and backward."""
    best = max(runs, key=lambda r: r.memory_saved)
    each = ", ".join(f"{r.strategy} -{100 * r.memory_saved:.0f} %" for r in runs)
    plain = format_bytes(best.evidence.baseline_peak_bytes or 0)
    sets = best.plan.predicted.tensors[0][0] if best.plan.predicted.tensors else "nothing"
    text = f"of {plain}: {each}"
    ok = best.memory_saved >= SAVED_SHARE
    if not ok:
        text += f" (30 % asked; the {best.plan.predicted.phase} sets the peak, most of it {sets})"
    return Gate(name="memory", ok=ok, text=text)


def check_profile(report: ProfileReport) -> list[Gate]:
    """Returns whether the profile's bytes are positive and add up, agree over runs, and its recommendations are over
    the line."""
    counted, measured = report.total_activation_bytes, report.measured_activation_bytes or 0
    negative = [layer.path for layer in report.layers if layer.activation_bytes < 0 or layer.forward_seconds < 0]
    agrees = abs(counted - measured) <= ESTIMATE_SHARE * max(counted, 1)
    sensible = counted > 0 and not negative and (report.peak_bytes is None or counted <= report.peak_bytes)
    line = report.layers[0].activation_mb / 2
    over = report.over(line)
    sizes = {layer.path: layer.activation_mb for layer in report.layers}
    return [
        Gate(
            name="profile: total",
            ok=sensible and agrees,
            text=f"{len(report.layers)} layers: {format_bytes(counted)} captured, {format_bytes(measured)} measured",
        ),
        Gate(
            name="profile: spread",
            ok=report.activation_spread < ESTIMATE_SHARE,
            text=f"{100 * report.activation_spread:.1f} % of the bytes over {report.num_runs} runs (times: "
            f"{100 * report.time_spread:.0f} %, not gated)",
        ),
        Gate(
            name="profile: over the line",
            ok=all(sizes[path] > line for path in over),
            text=f"{len(over)} layers recommended over {line:.3g} MiB",
        ),
    ]


def check_gradients(run: Trial, model: nn.Module) -> Gate:
    """Returns whether the strategy's loss, gradients, buffers and random streams are those of the plain step."""
    evidence = run.evidence
    tolerance = max(TOLERANCES.get(p.dtype, 1e-5) for p in model.parameters())
    same_state = evidence.buffers_equal and evidence.rng_equal and evidence.same_gradient_set
    ok = same_state and (evidence.gradients_equal or evidence.max_gradient_error <= tolerance)
    if evidence.gradients_equal and evidence.loss_equal and same_state:
        text = f"bit-equal, {evidence.num_regions_replayed} regions run twice"
    else:
        text = f"relative error {evidence.max_gradient_error:.1e} (at most {tolerance:.0e})"
        text += f"; {evidence.differences[0]}" if evidence.differences else ""
    return Gate(name=f"gradients: {run.strategy}", ok=ok, text=text)
