"""Terminal tables, advice, differences between plans, and the trace file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from recoup.ir.advice import advise
from recoup.ir.decision import OpMark, Rebuild, Recompute, Rederive
from recoup.ir.profile import Profile, ProfileRow, format_profile
from recoup.report.chrome_trace import make_chrome_trace
from recoup.report.diff import diff_plans, format_diff
from tests.ir.test_schema import make_plan
from tests.report.helpers import small_report

GIB = 2**30


def profile(**sizes: int) -> Profile:
    peak = sum(sizes.values())
    row = ProfileRow(
        path="",
        call=0,
        kind="Net",
        depth=0,
        saved_bytes=sizes.get("saved", 0),
        forward_seconds=1.0,
        backward_seconds=2.0,
        forward_flops=1,
    )
    parts = [dataclasses.replace(row, path=f"l.{i}", depth=1, saved_bytes=row.saved_bytes // 4) for i in range(4)]
    return Profile(
        model_class="Net",
        device="cpu",
        source="fake",
        reason="",
        num_parameters=1,
        peak_bytes=peak,
        phase="backward",
        at_peak=tuple(sizes.items()),
        tensors=(("mm in layers.*", sizes.get("saved", 0)),),
        rows=(row, *parts),
        timeline=(("saved", tuple(range(200)) + tuple(range(200, 0, -1))),),
        phases=(("forward", 0, 190), ("loss", 190, 200), ("backward", 200, 400)),
        step_seconds=3.0,
        plain_flops=3,
        saved_bytes=sizes.get("saved", 0),
        cost_source="flops",
    )


def test_the_profile_fits_a_screen() -> None:
    report, _, _ = small_report()
    for text in (format_profile(profile(parameter=GIB, saved=3 * GIB)), format_profile(report.profile)):
        lines = text.splitlines()
        assert max(map(len, lines)) <= 100
        assert len(lines) <= 60
        assert any("^forward" in line and "^backward" in line for line in lines)
        assert "memory over the step |" in text


def test_phase_marks_stand_under_their_columns() -> None:
    lines = format_profile(profile(parameter=GIB, saved=3 * GIB)).splitlines()
    at = next(i for i, line in enumerate(lines) if "memory over the step" in line)
    first, end = lines[at].index("|") + 1, lines[at].rindex("|")  # narrower in a narrower terminal
    assert lines[at + 1].index("^forward") == first
    assert lines[at + 1].index("^backward") == first + 200 * (end - first) // 400


def test_advice_says_when_recomputing_cannot_help_and_what_would() -> None:
    said = advise(profile(parameter=GIB, optimizer=8 * GIB, gradient=GIB, saved=GIB // 4))
    assert "cannot help much" in said[0] and "Most is optimizer (8.00 GiB)" in said[0] and "Adafactor" in said[0]
    assert len(advise(profile(parameter=GIB, saved=3 * GIB))) == 1
    assert "can be rederived or recomputed" in advise(profile(parameter=GIB, saved=3 * GIB))[0]


def test_advice_names_logits_and_a_giant_layer() -> None:
    base = profile(parameter=GIB, saved=3 * GIB)
    logits = dataclasses.replace(base, tensors=(("_log_softmax in loss", 2 * GIB), ("gradient of head", GIB)))
    assert "Logits and loss hold 2.00 GiB" in " ".join(advise(logits))
    rows = (base.rows[0], dataclasses.replace(base.rows[1], path="giant", saved_bytes=3 * GIB))
    assert "One call, `giant` (Net), saves 3.00 GiB" in " ".join(advise(dataclasses.replace(base, rows=rows)))


def test_differences_in_model_terms() -> None:
    regions = [Recompute(path=f"model.layers.{i}") for i in range(8)]
    a = make_plan(decisions=tuple(regions))
    b = make_plan(decisions=(Rederive(path=""), *regions[:4]), budget_bytes=1280)
    text = format_diff(a, b)
    assert "- model.layers.4-7: recompute -> rederive" in text
    assert "- (the model): save -> rederive" in text
    assert "budget" in text and "640 B" in text and "+100.0 %" in text
    assert max(map(len, text.splitlines())) <= 100
    assert set(diff_plans(a, b)["changes"]) == {"", *(f"model.layers.{i}" for i in range(4, 8))}
    assert diff_plans(a, a) == {"figures": {}, "changes": {}}
    assert "do the same" in format_diff(a, a)


def test_differences_follow_inheritance_and_spans() -> None:
    a = make_plan(decisions=(Recompute(path="l.0", span=("l.1",)),))
    b = make_plan(decisions=(Recompute(path="l.0"), Recompute(path="l.1")))
    assert diff_plans(a, b)["changes"] == {
        "l.0": ["recompute through l.1", "recompute"],
        "l.1": ["recompute with l.0", "recompute"],
    }


def test_differences_of_plans_by_tensor_say_what_is_held_where() -> None:
    def mark(path: str, ordinal: int, op: str, **what: bool) -> OpMark:
        return OpMark(path=path, call=0, ordinal=ordinal, op=f"aten.{op}.default", holds=True, **what)

    marks = (mark("emb", 0, "embedding", begins_segment=True), mark("", 0, "add"), mark("l.1", 0, "mm"))
    a = make_plan(decisions=(Rebuild(path="", marks=marks),))
    b = make_plan(decisions=(Rebuild(path="", marks=(*marks[:2], mark("", 1, "add", begins_segment=True))),))
    assert diff_plans(a, b)["changes"] == {
        "": ["rebuild in 1 segment, holding add", "rebuild in 2 segments, holding add (x2)"],
        "l.1": ["rebuild, holding mm", "rebuild"],
    }
    c = make_plan(decisions=(Recompute(path="l.1"),))
    assert diff_plans(a, c)["changes"] == {
        "": ["rebuild in 1 segment, holding add", "save"],
        "emb": ["rebuild, holding embedding", "save"],
        "l.1": ["rebuild, holding mm", "recompute"],
    }


def test_the_trace_file_has_lanes_and_counters() -> None:
    report, plain, planned = small_report()
    assert report.plan is not None and report.planned is not None
    measured = (report.measured_plain, report.measured_planned)
    data = json.loads(json.dumps(make_chrome_trace(plain, planned, report.plan.decisions, measured=measured)))
    events = data["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == 2}
    assert lanes == {"forward", "replay", "backward", "optimizer", "regions"}
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 2]
    assert max(sum(e["args"].values()) for e in counters) * 2**20 == pytest.approx(report.planned.peak_bytes, rel=0.01)
    slices = [e for e in events if e["ph"] == "X"]
    for process, timeline in zip((3, 4), measured, strict=True):
        assert timeline is not None
        levels = [e["args"]["measured"] for e in events if e["ph"] == "C" and e["pid"] == process]
        assert max(levels) * 2**20 == pytest.approx(timeline.peak_bytes, rel=0.01)
        assert [e["name"] for e in slices if e["pid"] == process] == ["forward", "backward"]
    assert all(e["dur"] >= 0 for e in slices)
    for lane in {(e["pid"], e["tid"]) for e in slices}:  # nested or apart, never across each other
        ends: list[float] = []
        for e in sorted((e for e in slices if (e["pid"], e["tid"]) == lane), key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= e["ts"] + 0.002:
                ends.pop()
            assert not ends or e["ts"] + e["dur"] <= ends[-1] + 0.002
            ends.append(e["ts"] + e["dur"])
    replayed = {e["tid"] for e in slices if e["pid"] == 2}
    assert 2 in replayed
