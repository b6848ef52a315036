"""Gathers what a report shows: captured and simulated steps, the curve, what people do by hand, measurements."""

from __future__ import annotations

from typing import Any

from recoup import progress
from recoup.analysis.module_table import module_rows
from recoup.analysis.profile import make_profile
from recoup.analysis.timeline import make_timeline
from recoup.api import Frontier
from recoup.cost.devices import DEVICES
from recoup.cost.model import PricedTrace
from recoup.ir.decision import describe_decisions
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.ir.report import CurvePoint, MeasuredTimeline, Report
from recoup.planner.driver import Planner
from recoup.solver.baselines import baselines

_BASELINES = ("full", "every-2", "every-4", "sqrt")


def make_report(
    curve: Frontier,
    *,
    plan: Plan | None = None,
    evidence: Evidence | None = None,
    measured: tuple[MeasuredTimeline | None, MeasuredTimeline | None] = (None, None),
) -> tuple[Report, PricedTrace, PricedTrace | None]:
    """Returns the report, and the priced plain and planned steps for a trace file.

    Args:
        curve: of the model the report is about.
        plan: made for it.
        evidence, measured: of steps that were run.
    """
    planner = curve.planner
    plain = planner.priced
    progress.advance("drawing the report")
    planned = planner.simulate_priced(plan.decisions) if plan is not None and plan.decisions else None
    decisions = plan.decisions if plan is not None else ()
    # What is predicted beyond the tensors: libraries' workspaces and, on a card, what its allocator rounds up.
    most = planner.plain.peak_bytes, planner.simulate(decisions).peak_bytes if planned is not None else 0
    fixed = tuple(
        max(0, size - make_timeline(step, plain=plain).peak_bytes) if step is not None else 0
        for size, step in zip(most, (plain, planned), strict=True)
    )
    device = plan.device if plan is not None else planner.trace.device
    report = Report(
        capacity_bytes=DEVICES[device].memory_bytes if device in DEVICES else 0,
        title=f"{planner.trace.model_class} on {device}",
        profile=make_profile(plain, device=device, plain_peak_bytes=most[0]),
        plain=make_timeline(plain, fixed_bytes=fixed[0]),
        planned=make_timeline(planned, plain=plain, fixed_bytes=fixed[1]) if planned is not None else None,
        measured_plain=measured[0],
        measured_planned=measured[1],
        frontier=tuple(
            CurvePoint(
                name="",
                peak_bytes=p.peak_bytes,
                extra_time_ratio=p.extra_time_ratio,
                num_regions=len(p.plan.regions),
                recomputed_flops=p.recomputed_flops,
                words=tuple(describe_decisions(p.plan.decisions)),
                is_exact=p.is_exact,
            )
            for p in curve.points
        ),
        baselines=tuple(_baselines(planner)),
        rows=module_rows(plain, planned, decisions, fixed_bytes=fixed),
        plan=plan,
        evidence=evidence,
    )
    return report, plain, planned


def _baselines(planner: Planner) -> Any:
    """Yields the usual plans by hand, simulated as every plan is."""
    view = planner.saving_view
    for baseline in baselines(view.solver.problem):
        if baseline.name not in _BASELINES:
            continue
        candidate = planner.simulate(view.decide(baseline.choice))
        yield CurvePoint(
            name=baseline.name,
            peak_bytes=candidate.peak_bytes,
            extra_time_ratio=candidate.step_seconds / planner.plain.step_seconds - 1,
            num_regions=sum(d.is_region for d in candidate.decisions),
            recomputed_flops=candidate.recomputed_flops,
            words=tuple(describe_decisions(candidate.decisions)),
        )
