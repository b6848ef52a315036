"""The command line's target `jax:FILE.py:FUNCTION`: a function that returns a loss function and its arguments."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from recoup.errors import TargetError

PREFIX = "jax:"
_KEYS = frozenset(("step", "args", "argnums", "has_aux", "optimizer"))


def resolve(text: str) -> dict[str, Any]:
    """Returns `step`, `args` and, where given, `argnums`, `has_aux` and `optimizer`.

    Args:
        text: `jax:FILE.py:FUNCTION`; the function takes nothing and returns a dict with these keys.

    Raises:
        TargetError: if there is no such file or function, or it returns something else.
    """
    path, _, name = text.removeprefix(PREFIX).partition(".py")
    file, name = Path(path + ".py"), name.removeprefix(":") or "target"
    if not file.is_file():
        raise TargetError(f"No file {str(file)!r} (looked in {Path.cwd()}). Write jax:FILE.py:FUNCTION.")
    function = runpy.run_path(str(file)).get(name)
    if not callable(function):
        raise TargetError(f"{str(file)!r} has no function {name!r}. Write jax:FILE.py:FUNCTION.")
    try:
        found = function()
    except Exception as error:
        raise TargetError(f"`{name}` of {str(file)!r} fails: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict) or not {"step", "args"} <= set(found) <= _KEYS:
        keys = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise TargetError(
            f"`{name}` of {str(file)!r} has to return a dict with `step`, `args` and no others than `argnums`, "
            f"`has_aux`, `optimizer`; it returns {keys}."
        )
    return found
