"""`recoup advise`: whether a budget needs activation checkpointing at all, and which."""

from __future__ import annotations

from recoup.cli import options
from recoup.cli.console import print_data, print_json, showing_progress


def advise(
    target: options.TorchTargetText,
    budget: options.Budget,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.PlanDevice = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say in five lines whether you need activation checkpointing at all, and which."""
    request = options.check_request(
        target, batch=batch, seq=seq, image=image, dtype=dtype, optimizer=optimizer, device=device, budget=budget
    )
    with showing_progress(quiet=quiet):
        found = request.resolve(runs=False)
        from recoup.selective.advise import advise as say_what  # with it comes torch

        text = say_what(found.model, found.batch, budget=budget, **request.keywords(found))
    if json:
        print_json({"advice": text})
    else:
        print_data(text)
