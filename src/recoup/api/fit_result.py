"""The result of `fit`: a plan, its handle and its evidence, as text and in a notebook."""

from __future__ import annotations

import dataclasses

from recoup.ir import html
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.ir.text import format_decisions
from recoup.report.text import format_fit
from recoup.runtime.apply import Applied


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fit:
    """A planned, changed and proven model.

    Attributes:
        plan: the plan that was applied.
        applied: the handle whose `remove` undoes it. If `evidence.ok` is False the plan is not in place, unless
            `apply_failed=True` was given.
        evidence: the comparison with the plain step: values, peak bytes, seconds.
    """

    plan: Plan
    applied: Applied
    evidence: Evidence

    def __repr__(self) -> str:
        return f"<Fit: {self.plan!r}, {self.evidence!r}>"

    def _repr_html_(self) -> str:
        title = f"{self.plan.model_class} on {self.plan.device}: {self.evidence.verdict}"
        shown = html.bars(self.evidence.measured, self.plan.budget_bytes)
        return html.card(
            title, shown, html.text(format_decisions(self.plan.decisions)), html.text(str(self), "evidence")
        )

    def __str__(self) -> str:
        return format_fit(self.plan, self.evidence)
