"""Targets `jax:FILE.py:FUNCTION`: the commands that plan JAX steps. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from recoup.cli.console import print_data, print_json, say, showing_progress
from recoup.errors import UsageError

PREFIX = "jax:"


def check_options(**options: Any) -> None:
    """Raises UsageError for options that have no meaning for a JAX step."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)} cannot be used with a jax: target. The function it names returns the step's arguments "
            "and, as `optimizer`, an optax optimizer."
        )


def named(actions: str | None) -> dict[str, Any]:
    """Returns the keyword `actions` where the option was given."""
    return {} if actions is None else {"actions": tuple(n.strip() for n in actions.split(",") if n.strip())}


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


def plan(
    target: str, budget: str, *, device: str | None, actions: str | None, out: Path | None, json: bool, quiet: bool
) -> None:
    """Does what `recoup plan` does."""
    import recoup.jax

    made = run(target, recoup.jax.plan, budget=budget, json=json, quiet=quiet, device=device, **named(actions))
    if out is not None:
        made.save(out)
        say(f"plan written to {out}", quiet=quiet)


def fit(
    target: str,
    budget: str,
    *,
    device: str | None,
    actions: str | None,
    out: Path | None,
    html: Path | None,
    json: bool,
    quiet: bool,
) -> None:
    """Does what `recoup fit` does; with `jax.ShapeDtypeStruct`s as arguments the proof is what compiles."""
    import recoup.jax
    from recoup.jax.targets import resolve

    with showing_progress(quiet=quiet):
        found = resolve(target)
        step, args = found.pop("step"), found.pop("args")
        made = recoup.jax.plan(step, *args, budget=budget, device=device, confirm=True, **found, **named(actions))
        found.pop("optimizer", None)
        evidence = recoup.jax.verify(step, made, *args, **found)
        page = recoup.jax.format_html(step, *args, plan=made, evidence=evidence, **found) if html is not None else ""
    if json:
        print_json({"plan": made.to_json(), "evidence": evidence.to_json()})
    else:
        print_data(f"{made}\n{evidence}\n{evidence.verdict}", ok=evidence.is_ok)
    if out is not None:
        made.save(out)
        say(f"plan written to {out}", quiet=quiet)
    if html is not None:
        html.write_text(page, encoding="utf-8")
        say(f"report written to {html}", quiet=quiet)
    if not evidence.is_ok:
        raise typer.Exit(1)


def verify(target: str, plan: Path, *, json: bool, quiet: bool) -> None:
    """Does what `recoup verify` does."""
    import recoup.jax
    from recoup.jax.targets import resolve

    made = recoup.jax.JaxPlan.load(plan)
    with showing_progress(quiet=quiet):
        found = resolve(target)
        found.pop("optimizer", None)
        evidence = recoup.jax.verify(found.pop("step"), made, *found.pop("args"), **found)
    if json:
        print_json(evidence.to_json())
    else:
        print_data(f"{evidence}\n{evidence.verdict}", ok=evidence.is_ok)
    if not evidence.is_ok:
        raise typer.Exit(1)


def frontier(target: str, *, device: str | None, actions: str | None, json: bool, quiet: bool) -> None:
    """Does what `recoup frontier` does."""
    import recoup.jax

    run(target, recoup.jax.frontier, json=json, quiet=quiet, device=device, **named(actions))


def profile(target: str, *, device: str | None, json: bool, quiet: bool) -> None:
    """Does what `recoup profile` does."""
    import recoup.jax

    run(target, recoup.jax.profile, json=json, quiet=quiet, device=device)
