"""`recoup gen-tests`: a pytest file with the gates, for your own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recoup.cli import options
from recoup.cli.console import print_data, say
from recoup.cli.validate import Strategies, split
from recoup.errors import UsageError

TestFile = Annotated[Path | None, typer.Option("--out", "-o", help="Write it here, not to stdout", dir_okay=False)]


def gen_tests(
    target: options.TorchTargetText,
    batch: options.Batch = None,
    seq: options.Seq = None,
    image: options.Image = None,
    device: options.RunDevice = None,
    strategies: Strategies = "full,selective,sequential",
    out: TestFile = None,
    quiet: options.Quiet = False,
) -> None:
    """Write a pytest file that checks the gates on a model."""
    options.check_request(target, batch=batch, seq=seq, image=image, device=device, out=out, runs=True)
    if out is not None and out.exists():
        raise UsageError(f"--out {out}: the file exists. Remove it first, or name another.")
    from recoup.selective.generate import generate_tests  # with it comes torch

    given = {"batch": batch, "seq": seq, "image": image, "device": device}
    if not target.startswith("hf:"):
        path, colon, function = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
        target = f"{Path(path).resolve()}{colon}{function}"
    source = generate_tests(
        target, sizes={k: v for k, v in given.items() if v is not None}, strategies=split(strategies)
    )
    if out is None:
        print_data(source)
    else:
        out.write_text(source)
        say(f"written to {out}; run it with pytest {out}", quiet=quiet)
