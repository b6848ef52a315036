"""`recoup fit`: plan, apply, and prove it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recoup.cli import jax_steps, options
from recoup.cli.allocator import keep_freed_memory
from recoup.cli.console import print_data, print_json, say, showing_progress
from recoup.cli.report import TraceFile, check_writable, write_html, write_trace
from recoup.errors import UsageError

if TYPE_CHECKING:
    from recoup.api import Fit
    from recoup.compiled.fitting import CompiledFit
    from recoup.cost.model import PricedTrace
    from recoup.ir.report import Report
    from recoup.targets.resolve import Target


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
    host_budget: options.HostBudget = None,
    effort: options.Effort = "normal",
    out: options.Out = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write a report here, one offline page", dir_okay=False)
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile the model (torch.compile, inductor) and plan the compiled step")
    ] = False,
    trace: TraceFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit a training step into a budget, and prove it: same gradients, measured peak, measured time."""
    check_writable(html, "--html")
    check_writable(trace, "--trace")
    if compiled and (html is not None or trace is not None or target.startswith(jax_steps.PREFIX)):
        raise UsageError(
            "--compiled has no page or trace yet, and is for PyTorch models: leave out --html, --trace, jax: targets."
        )
    if target.startswith(jax_steps.PREFIX):
        jax_steps.check_options(
            batch=batch,
            seq=seq,
            image=image,
            dtype=dtype,
            optimizer=optimizer,
            host_budget=host_budget,
            effort=None if effort == "normal" else effort,
        )
        jax_steps.fit(target, budget, device=device, actions=actions, out=out, html=html, json=json, quiet=quiet)
        return
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
        host_budget=host_budget,
        out=out,
        effort=effort,
        runs=True,
    )
    keep_freed_memory()
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=True)
        from recoup import api  # with it comes torch

        keywords = request.planning_keywords(found)
        done: Fit | CompiledFit
        eager, seen = None, None
        if compiled:
            done = api.fit(found.model, found.batch, budget=budget, compiled=True, **keywords)
        else:
            done = eager = api.fit(found.model, found.batch, budget=budget, **keywords)
            seen = _report(eager, found, keywords) if html is not None or trace is not None else None
    if out is not None:
        done.plan.save(out)
        say(f"plan written to {out}", quiet=quiet)
    if seen is not None and html is not None:
        write_html(seen[0], html, quiet=quiet)
    if eager is not None and seen is not None and trace is not None:
        write_trace(trace, *seen[1:], eager.plan.decisions, measured=seen[0], quiet=quiet)
    if json:
        print_json({"plan": done.plan.to_json(), "evidence": done.evidence.to_json()})
    else:
        print_data(str(done), ok=done.evidence.ok)
    if not done.evidence.ok:
        raise typer.Exit(1)


def _report(done: Fit, found: Target, keywords: dict[str, Any]) -> tuple[Report, PricedTrace, PricedTrace | None]:
    """Returns the report of what was fitted, and both priced steps; the model is without its plan afterwards."""
    from recoup import api
    from recoup.cli import report_data
    from recoup.evidence.measured_timeline import measure_timelines

    done.applied.remove()
    objective, batch = found.objective()
    measured = measure_timelines(
        found.model, done.plan, batch, objective=objective, optimizer=keywords.get("optimizer")
    )
    curve = api.frontier(found.model, found.batch, **{k: v for k, v in keywords.items() if k != "effort"})
    return report_data.make_report(curve, plan=done.plan, evidence=done.evidence, measured=measured)
