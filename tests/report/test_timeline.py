"""What the report draws adds up to what the planner says."""

from __future__ import annotations

import pytest

from recoup.analysis.timeline import make_timeline
from recoup.ir.decision import Recompute
from tests.report.helpers import small_report


def test_the_stack_adds_up_to_the_predicted_peaks() -> None:
    report, plain, _ = small_report()
    assert report.plan is not None and report.plain is not None and report.planned is not None
    for timeline, peak in (
        (report.plain, report.plan.predicted.plain_peak_bytes),
        (report.planned, report.plan.predicted.peak_bytes),
    ):
        totals = [sum(column) for column in zip(*(values for _, values in timeline.series), strict=True)]
        assert max(totals) == timeline.peak_bytes == peak == sum(size for _, size in timeline.at_peak)
        assert len(timeline.seconds) == len(totals)
        assert list(timeline.seconds) == sorted(timeline.seconds)
        assert timeline.phases[0][0] == "forward" and timeline.phases[-1][2] == pytest.approx(timeline.duration_seconds)
    assert make_timeline(plain, fixed_bytes=100).peak_bytes == report.plain.peak_bytes + 100


def test_measured_peaks_are_those_of_verify() -> None:
    report, _, _ = small_report()
    assert report.measured_plain is not None and report.measured_planned is not None and report.evidence is not None
    assert report.measured_plain.peak_bytes == report.evidence.baseline_peak_bytes
    assert report.measured_planned.peak_bytes == report.evidence.peak_bytes
    assert max(report.measured_planned.total_bytes) == report.measured_planned.peak_bytes
    assert [name for name, _, _ in report.measured_plain.phases] == ["forward", "backward"]


def test_module_rows_add_up_to_what_is_held_and_paid() -> None:
    report, _, planned = small_report()
    assert report.plan is not None
    top = [row for row in report.rows if row.depth == 0]
    predicted = report.plan.predicted
    assert sum(row.plain_saved_bytes for row in top) == predicted.plain_saved_bytes
    assert sum(row.saved_bytes for row in top) == predicted.saved_bytes
    twice = sum(s for s, o in zip(planned.op_seconds, planned.trace.ops, strict=True) if o.replayed)
    assert sum(row.extra_seconds for row in top) == pytest.approx(twice)
    assert [row.path for row in report.rows if row.depth == 1][:2] == ["layers.0", "layers.1"]


def test_the_optimizers_part_follows_the_planned_step() -> None:
    import torch

    from recoup import api
    from recoup.cost.model import FlopsCost
    from tests.models import make

    model, batch, loss = make("stack")
    curve = api.frontier(model, batch, loss=loss, optimizer=torch.optim.Adam, cost=FlopsCost(), num_points=2)
    plain = curve.planner.priced
    planned = curve.planner.simulate_priced((Recompute(path="layers.0"),))
    timeline = make_timeline(planned, plain=plain)
    assert timeline.phases[-1][0] == "optimizer"
    assert "replay" in {phase for phase, _, _ in timeline.phases}
    assert dict(timeline.series)["optimizer"]


def test_large_tensors_name_the_line_that_made_them() -> None:
    import torch

    from recoup import api
    from recoup.cost.model import FlopsCost

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * self.scale).exp()  # 128 KiB, made here
            return (y * y).sum()

    curve = api.frontier(Squares(), torch.randn(256, 128), cost=FlopsCost(), num_points=2)
    lines = {what: line for what, _, line in make_timeline(curve.planner.priced).tensors}
    first = Squares.forward.__code__.co_firstlineno
    # Backward's are said with the forward line whose node made them; what was there before the step has none.
    made, after = (f"tests/report/test_timeline.py:{first + i}" for i in (1, 2))
    assert next(line for what, line in lines.items() if what.startswith("exp")) == made
    assert set(lines.values()) <= {"", made, after} and lines["scale"] == ""


def test_on_a_card_the_page_adds_up_to_what_its_allocator_takes() -> None:
    import torch

    from recoup import api
    from recoup.cli import report_data
    from recoup.report.html import format_html
    from recoup.units import format_bytes

    layers = [torch.nn.Sequential(torch.nn.Linear(256, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 256))] * 3
    curve = api.frontier(
        torch.nn.Sequential(*layers), torch.randn(1000, 256), loss=lambda o, b: o.mean(), device="t4", num_points=2
    )
    plan = curve.plan("85%")
    report, _, _ = report_data.make_report(curve, plan=plan)
    assert report.plain is not None and report.planned is not None and report.capacity_bytes > 2**33
    peaks = [report.plain.peak_bytes, report.planned.peak_bytes]
    assert peaks == [plan.predicted.plain_peak_bytes, plan.predicted.peak_bytes]
    top = [row for row in report.rows if row.depth == 0]
    assert [sum(r.plain_peak_bytes for r in top), sum(r.peak_bytes for r in top)] == peaks
    assert f"the device has {format_bytes(report.capacity_bytes, (2**20, 'MiB'))}" in format_html(report)
