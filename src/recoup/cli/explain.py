"""`recoup explain`: why a plan is what it is."""

from __future__ import annotations

from recoup.cli import options
from recoup.cli.console import print_data, print_json, showing_progress


def explain(
    target: options.TorchTargetText,
    budget: options.Budget,
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
    """Say why a plan is what it is: what sets its peak, what each choice is worth, what other budgets would cost."""
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
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup import api  # with it comes torch

        found_out = api.explain(found.model, found.batch, budget=budget, **request.planning_keywords(found))
    if json:
        print_json(found_out.to_json())
    else:
        print_data(str(found_out))
