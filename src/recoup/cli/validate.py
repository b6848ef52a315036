"""`recoup validate`: the gates of activation checkpointing, on your own model."""

from __future__ import annotations

from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json, showing_progress

Strategies = Annotated[str, typer.Option(help="With commas: full, every-2, sequential, selective, rederive, budget")]


def validate(
    target: options.TorchTargetText,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    device: options.RunDevice = None,
    strategies: Strategies = "full,selective,sequential,budget",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check the gates on a model: memory 30 % lower, a profile that adds up, gradients of the plain step."""
    request = options.check_request(target, batch=batch, seq=seq, image=image, dtype=dtype, device=device, runs=True)
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=True)
        from recoup.selective.validate import validate as run_gates  # with it comes torch

        objective, sample = found.objective()
        done = run_gates(found.model, sample, objective=objective, strategies=split(strategies))
    if json:
        print_json(done.to_json())
    else:
        print_data(str(done), ok=done.ok)
    if not done.ok:
        raise typer.Exit(1)


def split(text: str) -> list[str]:
    """Returns the names between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
