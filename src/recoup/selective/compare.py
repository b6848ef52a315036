"""Memory and time of strategies over model sizes: what `recoup bench` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from recoup.ir.text import format_share
from recoup.selective.trial import Trial
from recoup.units import format_bytes, format_flops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy on one size of a model.

    Attributes:
        time_ratio: measured step over the plain step, None when not timed.
        time_spread: half the quartiles' distance.
        recomputed_flops: run a second time.
    """

    size: str
    strategy: str
    peak_bytes: int
    plain_peak_bytes: int
    saved_bytes: int
    plain_saved_bytes: int
    time_ratio: float | None
    time_spread: float | None
    recomputed_flops: int
    gradients_equal: bool

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return dataclasses.asdict(self)


def row_of(size: str, trial: Trial) -> Row:
    """Returns a trial as a row."""
    evidence, predicted = trial.evidence, trial.plan.predicted
    return Row(
        size=size,
        strategy=trial.strategy,
        peak_bytes=evidence.peak_bytes,
        plain_peak_bytes=evidence.baseline_peak_bytes or predicted.plain_peak_bytes,
        saved_bytes=predicted.saved_bytes,
        plain_saved_bytes=predicted.plain_saved_bytes,
        time_ratio=evidence.time_ratio,
        time_spread=evidence.time_spread,
        recomputed_flops=predicted.recomputed_flops,
        gradients_equal=evidence.gradients_equal,
    )


def format_rows(rows: Iterable[Row]) -> str:
    """Returns the table: measured peaks and times, captured saved bytes, each beside the plain step's."""
    lines = [
        f"{'size':28} {'strategy':10} {'peak':>10} {'of plain':>8} {'saved':>10} {'of plain':>8} {'time':>13} "
        f"{'run twice':>11} {'gradients':>9}"
    ]
    seen = ""
    for r in rows:
        if r.size != seen:
            seen = r.size
            lines.append(
                f"{_short(r.size):28} {'plain':10} {format_bytes(r.plain_peak_bytes):>10} {'100 %':>8} "
                f"{format_bytes(r.plain_saved_bytes):>10} {'100 %':>8} {'1.00':>13}"
            )
        time = f"{r.time_ratio:.2f} +- {r.time_spread:.2f}" if r.time_ratio is not None else "-"
        of_peak = format_share(r.peak_bytes, r.plain_peak_bytes)
        of_saved = format_share(r.saved_bytes, r.plain_saved_bytes)
        lines.append(
            f"{'':28} {r.strategy:10} {format_bytes(r.peak_bytes):>10} {of_peak:>8} "
            f"{format_bytes(r.saved_bytes):>10} {of_saved:>8} {time:>13} "
            f"{format_flops(r.recomputed_flops):>11} {'equal' if r.gradients_equal else 'differ':>9}"
        )
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= 28 else "..." + text[-25:]
