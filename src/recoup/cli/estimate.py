"""`recoup estimate`: the activation memory of a well-known model, by formula and in truth."""

from __future__ import annotations

from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json, showing_progress

Name = Annotated[str, typer.Argument(metavar="MODEL", help="llama-7b")]


def estimate(name: Name, json: options.Json = False, quiet: options.Quiet = False) -> None:
    """Show activation bytes over sequence and batch: textbook formulas beside captured steps."""
    options.silence_transformers()
    with showing_progress(quiet=quiet):
        from recoup.selective import estimate as estimates  # with it comes torch

        cells = estimates.estimate(name)
        checked = estimates.check_cell(name, cells[-1])
    if json:
        print_json({"cells": [cell.to_json() for cell in cells], "checked": checked})
    else:
        print_data(estimates.format_estimates(name, cells, checked=checked))
