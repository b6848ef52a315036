"""Where words go: data on stdout, talk and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console

from recoup import progress
from recoup.errors import InfeasibleBudget, RecoupError

_QUIET_SECONDS = 2.0  # between two lines of progress where there is no terminal


def print_data(text: str, *, ok: bool | None = None) -> None:
    """Prints a result; `ok` colours its last line, the verdict, if the terminal has colours."""
    if ok is None or not sys.stdout.isatty():
        typer.echo(text)
        return
    body, _, verdict = text.rpartition("\n")
    console = Console(highlight=False, markup=False, soft_wrap=True)  # it honours NO_COLOR
    if body:
        console.print(body)
    console.print(verdict, style="bold green" if ok else "bold red")


def print_json(data: Any) -> None:
    """Prints JSON data, indented."""
    typer.echo(json.dumps(data, indent=1))


def say(text: str, *, quiet: bool = False) -> None:
    """Says something that is not data."""
    if not quiet:
        typer.echo(text, err=True)


def print_error(error: BaseException, *, hint: str = "") -> None:
    """Prints `error: ...` on one line, and a hint on another where there is one."""
    message = " ".join(str(error).split()) or type(error).__name__
    typer.echo(f"error: {message}", err=True)
    if hint:
        typer.echo(f"hint: {hint}", err=True)


def hint_for(error: RecoupError) -> str:
    """Returns a hint for an error whose message does not say what to do."""
    if isinstance(error, InfeasibleBudget):
        return "`recoup frontier TARGET` shows every budget that can be reached, and what each costs in time"
    return ""


@contextlib.contextmanager
def showing_progress(*, quiet: bool) -> Iterator[None]:
    """Shows progress: a spinner on a terminal; elsewhere a line at most every two seconds.

    What the target's own code prints inside goes to stderr: stdout is for the result.
    """
    with contextlib.redirect_stdout(sys.stderr), _showing(quiet=quiet):
        yield


@contextlib.contextmanager
def _showing(*, quiet: bool) -> Iterator[None]:
    if quiet:
        yield
        return
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting", spinner="line") as status, progress.listening(_spinner(status.update)):
            yield
        return
    with progress.listening(_Lines()):
        yield


def _spinner(update: Any) -> progress.Listener:
    from rich.markup import escape

    begun = time.monotonic()

    def listener(text: str) -> None:
        update(f"{escape(text)} ({time.monotonic() - begun:.0f} s)")

    return listener


class _Lines:
    """Prints a text if two seconds have passed since the last one."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._printed >= _QUIET_SECONDS:
            self._printed = time.monotonic()
            typer.echo(f"... {text}", err=True)
