"""`recoup fit-length`: how many tokens a budget takes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json, showing_progress


def fit_length(
    target: options.TorchTargetText,
    budget: options.Budget,
    multiple_of: Annotated[int, typer.Option(help="Lengths tried are its multiples", min=1)] = 128,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    actions: options.Actions = None,
    host_budget: options.HostBudget = None,
    fsdp: options.Fsdp = None,
    limit: Annotated[int, typer.Option(help="The most tokens tried", min=1)] = 1 << 22,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the longest sequence inside a budget, and the most examples of shorter ones; nothing is allocated."""
    request = options.check_request(
        target,
        dtype=dtype,
        optimizer=optimizer,
        device=device,
        actions=actions,
        budget=budget,
        host_budget=host_budget,
        fsdp=fsdp,
    )
    with showing_progress(quiet=quiet):

        def make_batch(examples: int, tokens: int) -> Any:
            return dataclasses.replace(request, batch=examples, seq=tokens).resolve(runs=False).unpaired().batch

        found = dataclasses.replace(request, batch=1, seq=multiple_of).resolve(runs=False).unpaired()
        from recoup import api  # with it comes torch

        limits = api.max_tokens(
            found.model,
            make_batch,
            budget=budget,
            multiple_of=multiple_of,
            limit=limit,
            **request.planning_keywords(found),
        )
    if json:
        print_json(limits.to_json())
    else:
        print_data(str(limits))
