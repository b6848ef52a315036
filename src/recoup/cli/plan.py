"""`recoup plan`: decide, without running anything."""

from __future__ import annotations

from recoup.cli import jax_steps, options
from recoup.cli.console import print_data, print_json, say, showing_progress


def plan(
    target: options.TargetText,
    budget: options.Budget,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    actions: options.Actions = None,
    host_budget: options.HostBudget = None,
    fsdp: options.Fsdp = None,
    effort: options.Effort = "normal",
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the fastest plan inside a budget; nothing is allocated, and the device need not be there."""
    if target.startswith(jax_steps.PREFIX):
        jax_steps.check_options(
            batch=batch,
            seq=seq,
            image=image,
            dtype=dtype,
            optimizer=optimizer,
            host_budget=host_budget,
            fsdp=fsdp,
            effort=None if effort == "normal" else effort,
        )
        jax_steps.plan(target, budget, device=device, actions=actions, out=out, json=json, quiet=quiet)
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
        fsdp=fsdp,
        effort=effort,
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup import api  # with it comes torch

        made = api.plan(found.model, found.batch, budget=budget, **request.planning_keywords(found))
    if out is not None:
        made.save(out)
        say(f"plan written to {out}", quiet=quiet)
    if json:
        print_json(made.to_json())
    else:
        print_data(str(made))
