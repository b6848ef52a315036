"""`recoup frontier`: bytes against time, every point a plan."""

from __future__ import annotations

from recoup.cli import jax_steps, options
from recoup.cli.console import print_data, print_json, showing_progress


def frontier(
    target: options.TargetText,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    actions: options.Actions = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show the whole curve of memory against time, from the smallest reachable peak to the unplanned step."""
    if target.startswith(jax_steps.PREFIX):
        jax_steps.check_options(batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer)
        jax_steps.frontier(target, device=device, actions=actions, json=json, quiet=quiet)
        return
    request = options.check_request(
        target, batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer, device=device, actions=actions
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup import api  # with it comes torch

        curve = api.frontier(found.model, found.batch, **request.planning_keywords(found))
    if json:
        print_json([point.to_json() for point in curve.points])
    else:
        print_data(str(curve))
