"""`recoup verify`: prove a plan that was written before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recoup.cli import jax_steps, options
from recoup.cli.allocator import keep_freed_memory
from recoup.cli.console import print_data, print_json, showing_progress
from recoup.ir.plan import Plan


def verify(
    target: options.TargetText,
    plan: Annotated[Path, typer.Option(help="The plan, as `recoup plan --out` wrote it")],
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.RunDevice = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run the plain and the planned step side by side and compare gradients, memory and time."""
    if target.startswith(jax_steps.PREFIX):
        jax_steps.check_options(batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer, device=device)
        jax_steps.verify(target, plan, json=json, quiet=quiet)
        return
    made = Plan.load(plan)
    request = options.check_request(
        target, batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer, device=device, runs=True
    )
    keep_freed_memory()
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=True)
        from recoup import api  # with it comes torch

        keywords = request.keywords(found)
        keywords.pop("device", None)  # the model is there already
        with api.apply(found.model, made):
            evidence = api.verify(found.model, made, found.batch, **keywords)
    if json:
        print_json(evidence.to_json())
    else:
        print_data(f"{evidence}\n{evidence.verdict}", ok=evidence.ok)
    if not evidence.ok:
        raise typer.Exit(1)
