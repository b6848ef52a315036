"""A report of a small model with everything on it, made once."""

from __future__ import annotations

import functools

from recoup import api
from recoup.capture.step import Objective
from recoup.cli import report_data
from recoup.cost.model import FlopsCost, PricedTrace
from recoup.evidence.measured_timeline import measure_timelines
from recoup.ir.report import Report
from tests.models import Stack, make


@functools.cache
def small_report() -> tuple[Report, PricedTrace, PricedTrace]:
    """Returns the report of a stack of blocks fitted into 85 %, and the priced plain and planned steps."""
    model, batch, loss = make("stack")
    curve = api.frontier(model, batch, loss=loss, cost=FlopsCost(), num_points=5)
    plan = curve.plan("85%")
    evidence = api.verify(model, plan, batch, loss=loss, timed=False)
    measured = measure_timelines(model, plan, batch, objective=Objective(loss=loss))
    report, plain, planned = report_data.make_report(curve, plan=plan, evidence=evidence, measured=measured)
    assert planned is not None
    return report, plain, planned


@functools.cache
def deep_report(num_layers: int) -> Report:
    """Returns the report of many layers, each recomputed."""
    import torch

    from recoup.analysis.module_table import module_rows
    from recoup.analysis.timeline import make_timeline
    from recoup.ir.decision import Recompute

    model, batch = Stack(8, num_layers), torch.randn(4, 8)
    curve = api.frontier(model, batch, cost=FlopsCost(), num_points=2, actions=("rederive",))
    decisions = tuple(Recompute(path=f"layers.{i}") for i in range(num_layers))
    planned = curve.planner.simulate_priced(decisions)
    return Report(
        title="deep",
        plain=make_timeline(curve.planner.priced),
        planned=make_timeline(planned, plain=curve.planner.priced),
        rows=module_rows(curve.planner.priced, planned, decisions),
    )
