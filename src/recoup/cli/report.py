"""`recoup report`: everything about a step and its plan, as one offline page, a text, or a trace file."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json, say, showing_progress
from recoup.errors import UsageError
from recoup.ir.plan import Plan
from recoup.ir.report import Report

if TYPE_CHECKING:  # at run time with torch
    from recoup.cost.model import PricedTrace
    from recoup.ir.decision import Decision

TargetOrPlan = Annotated[
    str, typer.Argument(metavar="TARGET", help="FILE.py[:FUNCTION], hf:MODEL_TYPE?key=value, or a plan file (.json)")
]
PlanFile = Annotated[Path | None, typer.Option(help="Show this plan of the target, as --out wrote it", dir_okay=False)]
OutFile = Annotated[Path | None, typer.Option(help="Write here: a page if it ends in .html, else text", dir_okay=False)]
TraceFile = Annotated[Path | None, typer.Option(help="Also write a Chrome trace for Perfetto here", dir_okay=False)]


def report(
    target: TargetOrPlan,
    budget: options.BudgetIfAny = None,
    plan: PlanFile = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    actions: options.Actions = None,
    out: OutFile = None,
    trace: TraceFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show the profile of the unplanned step, the curve of memory against time, and a plan."""
    if target.endswith(".json"):
        _report_plan(target, out=out, json=json, quiet=quiet, budget=budget, plan=plan, trace=trace)
        return
    if plan is not None and budget is not None:
        raise UsageError("--plan and --budget both name a plan to show. Give one of them.")
    given = Plan.load(plan) if plan is not None else None
    check_writable(trace, "--trace")
    request = options.check_request(
        target,
        batch=batch,
        seq=seq,
        image=image,
        dtype=dtype,
        optimizer=optimizer,
        device=device if device is not None or given is None else _device_of(given),
        actions=actions,
        budget=budget,
        out=out,
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup import api  # with them comes torch
        from recoup.cli import report_data

        if given is not None:
            from recoup.capture.fingerprint import fingerprint

            _check_same_model(given, fingerprint(found.model))
        curve = api.frontier(found.model, found.batch, **request.planning_keywords(found))
        made = curve.plan(budget) if given is None and budget is not None else given
        shown, plain, planned = report_data.make_report(curve, plan=made)
        if trace is not None:
            write_trace(trace, plain, planned, made.decisions if made is not None else (), quiet=quiet)
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        write_html(shown, out, quiet=quiet)
        if json:
            print_json(shown.to_json())
        return
    parts = [str(shown.profile), f"Plans for {shown.title}, from the smallest reachable peak up\n{curve}"]
    if made is not None:
        parts.append(str(made))
    if out is not None:
        out.write_text("\n\n".join(parts) + "\n")
        say(f"report written to {out}", quiet=quiet)
    if json:
        print_json(shown.to_json())
    elif out is None:
        print_data("\n\n".join(parts))


def write_html(shown: Report, out: Path, *, quiet: bool) -> None:
    """Writes the page."""
    from recoup.report.html import format_html

    out.write_text(format_html(shown), encoding="utf-8")
    say(f"report written to {out}", quiet=quiet)


def write_trace(
    path: Path,
    plain: PricedTrace,
    planned: PricedTrace | None,
    decisions: Sequence[Decision],
    *,
    measured: Report | None = None,
    quiet: bool,
) -> None:
    """Writes the trace file; with what was measured, if there is a report of it."""
    from recoup.report.chrome_trace import make_chrome_trace

    seen = (measured.measured_plain, measured.measured_planned) if measured is not None else (None, None)
    path.write_text(json_module.dumps(make_chrome_trace(plain, planned, decisions, measured=seen)))
    say(f"trace written to {path}: open it in ui.perfetto.dev", quiet=quiet)


def check_writable(path: Path | None, option: str) -> None:
    """Raises UsageError if there is no folder to write `path` in."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {str(path.parent)!r}. Make it first.")


def _report_plan(target: str, *, out: Path | None, json: bool, quiet: bool, **others: Any) -> None:
    """Shows a plan file by itself: words and predictions, no captured step."""
    for name, value in others.items():
        if value is not None:
            raise UsageError(
                f"--{name} needs the model: `recoup report TARGET --plan {target}` shows this plan on its step."
            )
    check_writable(out, "--out")
    made = Plan.load(target)
    shown = Report(title=f"{made.model_class} on {made.device}", plan=made)
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        write_html(shown, out, quiet=quiet)
    elif out is not None:
        out.write_text(f"{made}\n")
    if json:
        print_json(shown.to_json())
    elif out is None:
        print_data(str(made))


def _device_of(plan: Plan) -> str | None:
    return plan.device if plan.device != "cpu" else None


def _check_same_model(plan: Plan, fingerprint: str) -> None:
    from recoup.errors import PlanMismatch

    if plan.fingerprint != fingerprint:
        raise PlanMismatch(
            f"This plan was made for another model (structure {plan.fingerprint}, this one {fingerprint}). Name the "
            "target with the sizes the plan was made with."
        )
