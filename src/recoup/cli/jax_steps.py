"""Targets `jax:FILE.py:FUNCTION`: the commands that plan JAX steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recoup.cli.console import print_data, print_json, say, showing_progress
from recoup.errors import UsageError

PREFIX = "jax:"


def check_options(**options: Any) -> None:
    """Raises UsageError for options that say nothing of a JAX step: its arguments come with it."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be used with a jax: target. The function it names returns the step's arguments "
            "and, as `optimizer`, an optax optimizer."
        )


def run(target: str, call: Callable[..., Any], *, json: bool, quiet: bool, device: str | None, **keywords: Any) -> Any:
    """Calls `recoup.jax.plan`, `frontier` or `profile` on what the target names, and prints what it returns."""
    from recoup.jax.targets import resolve  # with it comes jax

    with showing_progress(quiet=quiet):
        found = resolve(target)
        made = call(found.pop("step"), *found.pop("args"), device=device, **found, **keywords)
    if json:
        print_json(made.to_json())
    else:
        print_data(str(made))
    return made


def plan(target: str, budget: str, *, device: str | None, out: Path | None, json: bool, quiet: bool) -> None:
    """Does what `recoup plan` does."""
    import recoup.jax

    made = run(target, recoup.jax.plan, budget=budget, json=json, quiet=quiet, device=device)
    if out is not None:
        made.save(out)
        say(f"plan written to {out}", quiet=quiet)


def frontier(target: str, *, device: str | None, json: bool, quiet: bool) -> None:
    """Does what `recoup frontier` does."""
    import recoup.jax

    run(target, recoup.jax.frontier, json=json, quiet=quiet, device=device)


def profile(target: str, *, device: str | None, json: bool, quiet: bool) -> None:
    """Does what `recoup profile` does."""
    import recoup.jax

    run(target, recoup.jax.profile, json=json, quiet=quiet, device=device)
