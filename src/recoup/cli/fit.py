"""`recoup fit`: plan, apply, and prove it."""

from __future__ import annotations

import typer

from recoup.cli import options
from recoup.cli.allocator import keep_freed_memory
from recoup.cli.console import print_data, print_json, say, showing_progress


def fit(
    target: options.TargetText,
    budget: options.Budget,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.RunDevice = None,
    actions: options.Actions = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit a training step into a budget, and prove it: same gradients, measured peak, measured time."""
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
        runs=True,
    )
    keep_freed_memory()
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=True)
        from recoup import api  # with it comes torch

        done = api.fit(found.model, found.batch, budget=budget, **request.planning_keywords(found))
    if json:
        print_json({"plan": done.plan.to_json(), "evidence": done.evidence.to_json()})
    else:
        print_data(str(done), ok=done.evidence.ok)
    if out is not None:
        done.plan.save(out)
        say(f"plan written to {out}", quiet=quiet)
    if not done.evidence.ok:
        raise typer.Exit(1)
