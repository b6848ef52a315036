"""Measurements of `verify`: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from recoup.ir import html
from recoup.ir.text import format_percent, format_rows, format_share
from recoup.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evidence:
    """A plain step and a planned step, side by side: same weights, same random numbers.

    Attributes:
        peak_bytes: measured peak of the planned step, everything counted.
        baseline_peak_bytes: of the plain step, None when it did not fit.
        predicted_peak_bytes: what the plan said.
        budget_bytes: what was asked.
        gradients_equal: every gradient bit for bit.
        max_gradient_error: the largest relative difference of one gradient, ||planned - plain|| / ||plain||.
        loss_equal: whether the losses are equal bit for bit.
        buffers_equal: whether the buffers after the step are equal bit for bit.
        rng_equal: whether the random streams end in the same state.
        same_gradient_set: the same parameters got a gradient.
        time_ratio: planned step over plain step, median over neighbours of steps run in turn; None: not timed.
        time_spread: half the distance between the quartiles of that ratio.
        num_regions_replayed: regions that ran again.
        num_rederived: saved tensors rebuilt.
        replays_equal: every tensor that a region's second forward saved had the bits of the first one's.
        num_replays_compared: how many were compared.
        differences: what differed, in words, the first first.
        meter: how the peak was measured.
        notes: what was left out and why.
        error_bound: 0 where every gradient must be bit-equal; with `tile`, which sums in another order, how far the
            loss and gradients may be from plain's, relative (a gradient's error to its norm, or to a thousandth of the
            norm of all gradients where that is more).
        loss_error: relative difference of the loss.
        num_scan_evaluations: step evaluations of scans whose bytes the plan decides, in the planned step that was
            compared.
        predicted_scan_evaluations: what the plan said.
        regions_diverged: paths of regions whose second forward gave other values.
        plain_repeats: whether plain steps gave the same bits twice, which is asked only where something differed.
        offloaded_bytes: moved to the host by the metered step.
        predicted_offloaded_bytes: what the plan said.
    """

    peak_bytes: int
    baseline_peak_bytes: int | None
    predicted_peak_bytes: int
    budget_bytes: int
    gradients_equal: bool
    max_gradient_error: float
    loss_equal: bool
    buffers_equal: bool
    rng_equal: bool
    same_gradient_set: bool
    time_ratio: float | None
    time_spread: float | None
    num_regions_replayed: int
    num_rederived: int
    differences: tuple[str, ...]
    meter: str
    notes: tuple[str, ...] = ()
    replays_equal: bool = True
    num_replays_compared: int = 0
    error_bound: float = 0.0
    loss_error: float = 0.0
    offloaded_bytes: int = 0
    predicted_offloaded_bytes: int = 0
    num_scan_evaluations: int = 0
    predicted_scan_evaluations: int = 0
    regions_diverged: tuple[str, ...] = ()
    plain_repeats: bool = True

    @property
    def exactness(self) -> str:
        """What was promised of the gradients: "bit-equal", or "rounding" where sums are taken in another order."""
        return "rounding" if self.error_bound else "bit-equal"

    @property
    def values_hold(self) -> bool:
        """Whether loss and gradients are what was promised: equal bits, or within the bound of a plan with tiles."""
        if self.gradients_equal and self.loss_equal:
            return True
        return 0 < self.error_bound >= max(self.max_gradient_error, self.loss_error) and self.same_gradient_set

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at or under the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def exact(self) -> bool:
        """Whether the planned step did what the plain step does: bit for bit, or to rounding with tiles."""
        return (
            self.values_hold and self.buffers_equal and self.rng_equal and self.same_gradient_set and self.replays_equal
        )

    @property
    def ok(self) -> bool:
        """Whether everything that was promised held."""
        return self.within_budget and self.exact and self.moved_as_planned and self.evaluated_as_planned

    @property
    def evaluated_as_planned(self) -> bool:
        """Whether scans evaluated as many steps as the plan said, which it says of steps that fake tensors followed."""
        return self.predicted_scan_evaluations in (0, self.num_scan_evaluations)

    @property
    def moved_as_planned(self) -> bool:
        """Whether the bytes that went to the host are those that the plan said."""
        return self.offloaded_bytes == self.predicted_offloaded_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        properties = {"within_budget": self.within_budget, "exactness": self.exactness, "ok": self.ok}
        properties["moved_as_planned"] = self.moved_as_planned
        properties["evaluated_as_planned"] = self.evaluated_as_planned
        return {**dataclasses.asdict(self), **properties}

    @property
    def verdict(self) -> str:
        """The last line: whether everything that was promised held, and which promise that was."""
        if not self.ok:
            why = next(iter(self.differences), "")
            if not self.within_budget:
                over_bytes = self.peak_bytes - self.budget_bytes
                why = f"{format_bytes(self.peak_bytes)} is over the budget, by {format_bytes(over_bytes)}"
            elif self.exact:
                why = "the step did not do what the plan said"
            return f"FAILED: {why}" if why else "FAILED: see above"
        if self.gradients_equal and self.loss_equal:
            return "ok: within the budget, and exact"
        error = max(self.max_gradient_error, self.loss_error)
        return (
            f"ok: within the budget, and equal within rounding (largest relative error {error:.1e}, bound "
            f"{self.error_bound:.1e})"
        )

    def __repr__(self) -> str:
        return f"<Evidence: {self.verdict}; measured peak {format_bytes(self.peak_bytes)}>"

    def _repr_html_(self) -> str:
        return html.card(self.verdict, html.bars(self.measured, self.budget_bytes), html.text(str(self), "all of it"))

    @property
    def measured(self) -> list[tuple[str, int]]:
        """The measured peaks, as (which, bytes)."""
        plain = [("plain peak", self.baseline_peak_bytes)] if self.baseline_peak_bytes is not None else []
        return [*plain, ("measured peak", self.peak_bytes)]

    def __str__(self) -> str:
        return format_rows(_rows(self)) + _notes(self)


def _rows(evidence: Evidence) -> list[tuple[str, str]]:
    baseline = evidence.baseline_peak_bytes
    error = evidence.predicted_peak_bytes / evidence.peak_bytes - 1 if evidence.peak_bytes else 0.0
    rows = [
        ("plain peak", format_bytes(baseline) + " measured" if baseline is not None else "does not fit"),
        ("budget", format_bytes(evidence.budget_bytes)),
        ("predicted peak", f"{format_bytes(evidence.predicted_peak_bytes)} ({format_percent(error)} of measured)"),
        (
            "measured peak",
            format_bytes(evidence.peak_bytes)
            + (f" ({format_share(evidence.peak_bytes, baseline)} of plain)" if baseline else "")
            + (", within the budget" if evidence.within_budget else ", OVER THE BUDGET"),
        ),
        ("gradients", _exactness(evidence)),
        ("loss", _loss(evidence)),
        ("buffers", "bit-equal" if evidence.buffers_equal else "DIFFER"),
        ("random streams", "end where plain's end" if evidence.rng_equal else "END ELSEWHERE"),
        *([("replays", _replays(evidence))] if evidence.num_replays_compared else []),
        ("run twice", _run_twice(evidence)),
    ]
    if evidence.offloaded_bytes or evidence.predicted_offloaded_bytes:
        agrees = "as predicted" if evidence.moved_as_planned else "predicted "
        agrees += "" if evidence.moved_as_planned else format_bytes(evidence.predicted_offloaded_bytes)
        rows.append(("to the host", f"{format_bytes(evidence.offloaded_bytes)} a step, {agrees}"))
    if evidence.num_scan_evaluations:
        agrees = "as predicted" if evidence.evaluated_as_planned else f"predicted {evidence.predicted_scan_evaluations}"
        rows.append(("scans", f"{evidence.num_scan_evaluations} step evaluations, {agrees}"))
    if evidence.time_ratio is not None:
        rows.append(
            ("time over plain", f"{evidence.time_ratio:.3f} +- {evidence.time_spread or 0:.3f} (median of pairs)")
        )
    return rows


def _exactness(evidence: Evidence) -> str:
    if evidence.gradients_equal:
        return "bit-equal to plain, every one"
    if 0 < evidence.error_bound >= evidence.max_gradient_error:
        why = "tiles sum in another order" if evidence.plain_repeats else "plain steps differ by as much"
        return (
            f"equal to plain within rounding ({why}): largest relative error {evidence.max_gradient_error:.1e}, "
            f"bound {evidence.error_bound:.1e}"
        )
    return f"DIFFER: largest relative error {evidence.max_gradient_error:.2e}"


def _loss(evidence: Evidence) -> str:
    if evidence.loss_equal:
        return "bit-equal"
    held = 0 < evidence.error_bound >= evidence.loss_error
    return f"equal within rounding: relative error {evidence.loss_error:.1e}" if held else "DIFFERS"


def _run_twice(evidence: Evidence) -> str:
    regions, rebuilt = evidence.num_regions_replayed, evidence.num_rederived
    ran = [f"{regions} regions"] if regions else []
    return ", ".join([*ran, f"what makes {rebuilt} saved tensors again"] if rebuilt else ran) or "nothing"


def _replays(evidence: Evidence) -> str:
    saved = f"{evidence.num_replays_compared} saved tensors"
    return f"{saved} bit-equal to the first forward's" if evidence.replays_equal else f"of {saved}, some DIFFER"


def _notes(evidence: Evidence) -> str:
    shown = () if evidence.values_hold and evidence.buffers_equal and evidence.rng_equal else evidence.differences[:8]
    lines = [f"  differs: {d}" for d in shown]
    lines += [f"  note: {n}" for n in evidence.notes]
    lines.append(f"  meter: {evidence.meter}")
    return "\n" + "\n".join(lines)
