"""`recoup bench`: memory and time of strategies over model sizes."""

from __future__ import annotations

from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.allocator import keep_freed_memory
from recoup.cli.console import print_data, print_json, showing_progress
from recoup.cli.validate import Strategies, split
from recoup.errors import UsageError

Targets = Annotated[list[str], typer.Argument(metavar="TARGET...", help="One or several, for instance two sizes")]
Batches = Annotated[str | None, typer.Option(help="Batch sizes with commas: 1,2,4")]


def bench(
    targets: Targets,
    batches: Batches = None,
    seq: options.Seq = None,
    image: options.Image = None,
    dtype: options.Dtype = None,
    optimizer: options.Optimizer = None,
    device: options.RunDevice = None,
    strategies: Strategies = "full,every-2,sequential,selective,rederive,budget",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure memory and time of strategies on models of several sizes."""
    sizes = [_whole(text) for text in split(batches)] if batches is not None else [None]
    requests = [
        options.check_request(
            text, batch=size, seq=seq, image=image, dtype=dtype, optimizer=optimizer, device=device, runs=True
        )
        for text in targets
        for size in sizes
    ]
    keep_freed_memory()
    rows = []
    with showing_progress(quiet=quiet):
        for request in requests:
            found = request.resolve(runs=True)
            from recoup.selective.compare import format_rows, row_of  # with it comes torch
            from recoup.selective.trial import Trials

            keywords = request.keywords(found)
            objective, sample = found.objective()
            trials = Trials(found.model, sample, objective=objective, optimizer=keywords["optimizer"])
            name = request.text if request.batch is None else f"{request.text} x {request.batch}"
            rows += [row_of(name, trials.run(strategy, timed=True)) for strategy in split(strategies)]
    if json:
        print_json([row.to_json() for row in rows])
    else:
        print_data(format_rows(rows))


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"--batches {text!r}: write whole numbers of at least 1: --batches 1,2,4.")
    return int(text)
