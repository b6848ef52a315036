"""The `recoup` command.

Exit status: 0 ok, 1 failed (evidence that is not ok, or a bug), 2 usage, 3 no plan fits the budget.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from recoup import __version__
from recoup.cli.advise import advise
from recoup.cli.bench import bench
from recoup.cli.console import hint_for, print_error, print_json
from recoup.cli.diff import diff
from recoup.cli.estimate import estimate
from recoup.cli.explain import explain
from recoup.cli.export import export
from recoup.cli.fit import fit
from recoup.cli.fit_length import fit_length
from recoup.cli.frontier import frontier
from recoup.cli.gen_tests import gen_tests
from recoup.cli.plan import plan
from recoup.cli.profile import profile
from recoup.cli.report import report
from recoup.cli.show import show
from recoup.cli.validate import validate
from recoup.cli.verify import verify
from recoup.errors import RecoupError, TargetError, UsageError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter, read when torch is loaded
app = typer.Typer(
    name="recoup",
    help="Fit a PyTorch training step into a byte budget, exactly, and prove it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_COMMANDS = (
    *(fit, plan, fit_length, explain, profile, frontier, verify, report, show, diff, export),
    *(advise, validate, gen_tests, bench, estimate),
)
for _command in _COMMANDS:
    app.command(short_help=(_command.__doc__ or "").partition("\n")[0])(_command)

# typer carries its own copy of click since 0.20 or so, and used click's before; the base class is found through it.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"recoup {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Fit a PyTorch training step into a byte budget, exactly, and prove it."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status; an error of ours is one line, anything else propagates."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = typer.main.get_command(app).main(args=arguments, prog_name="recoup", standalone_mode=False)
    except RecoupError as error:
        return _refused(error, hint_for(error), arguments)
    except _ClickException as error:
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # the help is the message
            return 2
        command = context.command_path if context is not None else "recoup"
        return _refused(UsageError(error.format_message()), f"{command} --help", arguments)
    except BrokenPipeError:  # whoever read stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more at its end
        return 1
    except OSError as error:  # a file named on the command line cannot be read or written
        if error.filename is None:
            raise
        where = UsageError(f"{error.filename}: {error.strerror}. Name a file that can be read or written.")
        return _refused(where, "", arguments)
    except SystemExit as error:  # in the target's forward, say
        return _refused(TargetError(f"The target's code ended the process (SystemExit: {error.code})."), "", arguments)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return 130
    return status if isinstance(status, int) else 0


def _refused(error: RecoupError, hint: str, arguments: Sequence[str]) -> int:
    """Says why nothing was done, as JSON too where that was asked for; returns the exit status."""
    if "--json" in arguments:
        print_json({"error": {"code": error.code, "message": str(error), "hint": hint}})
    print_error(error, hint=hint)
    return error.exit_code


def main() -> None:
    """Runs `recoup` and exits."""
    sys.exit(run())
