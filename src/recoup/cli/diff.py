"""`recoup diff`: two plan files side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json
from recoup.ir.plan import Plan
from recoup.report.diff import diff_plans, format_diff

_PlanFile = Annotated[Path, typer.Argument(help="A plan, as `recoup plan --out` wrote it")]


def diff(a: _PlanFile, b: _PlanFile, json: options.Json = False) -> None:
    """Say what two plan files do differently, in model terms."""
    first, second = Plan.load(a), Plan.load(b)
    if json:
        print_json(diff_plans(first, second))
    else:
        print_data(format_diff(first, second))
