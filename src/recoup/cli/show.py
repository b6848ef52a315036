"""`recoup show`: a plan file in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json
from recoup.ir.plan import Plan


def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, as `recoup plan --out` wrote it")],
    json: options.Json = False,
) -> None:
    """Say in words what a plan file does."""
    made = Plan.load(plan)
    if json:
        print_json(made.to_json())
    else:
        print_data(str(made))
