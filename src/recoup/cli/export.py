"""`recoup export`: a plan file as code that runs without recoup."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.console import print_data, print_json, say
from recoup.cli.report import check_writable
from recoup.export.compiled import export_compiled
from recoup.export.fsdp import export_fsdp
from recoup.export.plain_torch import export_torch
from recoup.export.transformers_setting import export_transformers
from recoup.ir.compiled_plan import CompiledPlan
from recoup.ir.plan import Plan


class To(StrEnum):
    """Whose terms to write the plan in."""

    torch = "torch"
    transformers = "transformers"
    fsdp = "fsdp"
    compile = "compile"


_EXPORTERS = {To.torch: export_torch, To.transformers: export_transformers, To.fsdp: export_fsdp}


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, as `recoup plan --out` wrote it")],
    to: Annotated[
        To, typer.Option(help="torch: a plain file; transformers: its own setting; fsdp: a policy; compile: a backend")
    ] = To.torch,
    out: Annotated[Path | None, typer.Option(help="Write the code here instead of to stdout", dir_okay=False)] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a plan as code that needs no recoup: for plain torch, transformers, FSDP, torch.compile."""
    check_writable(out, "--out")
    made = export_compiled(CompiledPlan.load(plan)) if to is To.compile else _EXPORTERS[to](Plan.load(plan))
    for sentence in made.left_out:
        say(f"note: {sentence}", quiet=quiet)
    if out is not None:
        out.write_text(made.code)
        say(f"code written to {out}", quiet=quiet)
    if json:
        print_json({"code": made.code, "left_out": list(made.left_out)})
    elif out is None:
        print_data(made.code.rstrip())
