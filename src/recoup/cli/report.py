"""`recoup report`: profile, curve and plan in one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json, say, showing_progress


def report(
    target: options.TargetText,
    budget: options.BudgetIfAny = None,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    actions: options.Actions = None,
    out: Annotated[Path | None, typer.Option(help="Write the text here instead of to stdout", dir_okay=False)] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show the profile of the unplanned step, the curve of memory against time, and the plan for a budget."""
    request = options.check_request(
        target,
        batch=batch,
        seq=seq,
        image=image,
        dtype=dtype,
        optimizer=optimizer,
        device=device,
        actions=actions,
        budget=budget,
        out=out,
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup import api  # with it comes torch

        seen = api.profile(found.model, found.batch, **request.keywords(found))
        curve = api.frontier(found.model, found.batch, **request.planning_keywords(found))
        made = curve.plan(budget) if budget is not None else None
    if json:
        data: dict[str, Any] = {"profile": seen.to_json(), "frontier": [p.to_json() for p in curve.points]}
        print_json({**data, "plan": made.to_json() if made is not None else None})
        return
    parts = [str(seen), f"Plans for {seen.model_class}, from the smallest reachable peak up\n{curve}"]
    if made is not None:
        parts.append(str(made))
    text = "\n\n".join(parts)
    if out is None:
        print_data(text)
    else:
        out.write_text(text + "\n")
        say(f"report written to {out}", quiet=quiet)
