"""What `verify` measured: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A plain step and a planned step, side by side: same weights, same random numbers.

    Attributes:
        peak_bytes: measured peak of the planned step, everything counted. baseline_peak_bytes: of the plain step,
            None when it did not fit.
        predicted_peak_bytes: what the plan said. budget_bytes: what was asked.
        gradients_equal: every gradient bit for bit. max_gradient_error: the largest relative difference of one
            gradient, ||planned - plain|| / ||plain||.
        loss_equal, buffers_equal, rng_equal: bit for bit. same_gradient_set: the same parameters got a gradient.
        time_ratio: planned step over plain step, median of interleaved pairs; None when it was not timed.
        time_spread: half the distance between the quartiles of that ratio.
        num_regions_replayed: regions that ran again. num_rederived: saved tensors rebuilt.
        replays_equal: every tensor that a region's second forward saved had the bits of the first one's.
            num_replays_compared: how many were compared.
        differences: what differed, in words, the first first.
        meter: how the peak was measured. notes: what was left out and why.
        error_bound: 0 where every gradient must be bit-equal; with `tile`, which sums in another order, how far the
            loss and gradients may be from plain's, relative (a gradient's error to its norm, or to a thousandth of the
            norm of all gradients where that is more). loss_error: relative difference of the loss.
        num_scan_evaluations: step evaluations of scans whose bytes the plan decides, in the planned step that was
            compared. predicted_scan_evaluations: what the plan said.
        regions_diverged: paths of regions whose second forward gave other values. plain_repeats: whether plain steps
            gave the same bits twice, which is asked only where something differed.
        offloaded_bytes: moved to the host by the metered step. predicted_offloaded_bytes: what the plan said.
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
        return max(self.max_gradient_error, self.loss_error) <= self.error_bound and self.same_gradient_set

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

    def __str__(self) -> str:
        from recoup.report.text import format_evidence  # report/ stands above ir/: only needed when somebody prints

        return format_evidence(self)
