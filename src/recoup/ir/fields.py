"""Dataclasses from JSON that a stranger wrote: each field checked against its type before anything is made of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from recoup.errors import UsageError
from recoup.thresholds import TEXT_COLUMNS

T = TypeVar("T")


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Returns the type of each field of a dataclass."""
    found = typing.get_type_hints(kind)
    return {field.name: found[field.name] for field in dataclasses.fields(kind)}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that a field has; a text has no control characters, a number is finite."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        of_each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(of_each) and all(map(fits, value, of_each))
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.maxsize and math.isfinite(value)
    if hint is int:
        return type(value) is int and abs(value) <= sys.maxsize  # `True` is no number
    if hint is str:
        return type(value) is str and value.isprintable()
    return type(value) is hint


def said(hint: Any) -> str:
    """Returns a type in words, for a message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(repr(a) for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(said(a) for a in arguments)
    if origin is tuple:
        if arguments[-1] is not Ellipsis:
            return f"a tuple of {' and '.join(said(a) for a in arguments)}"
        return "a tuple of " + ("texts" if arguments[0] is str else said(arguments[0]))
    simple = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}
    return simple.get(hint, f"an object ({getattr(hint, '__name__', hint)})")


def shown(value: Any) -> str:
    """Returns any value as one short line of ASCII."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= TEXT_COLUMNS else f"{text[:TEXT_COLUMNS]}..."


def check_schema(data: Any, schema: str) -> None:
    """Raises UsageError unless `data` is a JSON object of a schema: "kind/version"."""
    found = data.get("schema") if isinstance(data, Mapping) else None
    if found == schema:
        return
    kind = _KINDS[schema.partition("/")[0]]
    other = _KINDS.get(str(found).partition("/")[0])
    if other is None:
        what = shown(found) if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise UsageError(f"Not a recoup plan: expected schema {schema!r}, found {what}. Plan again.")
    if other != kind:
        raise UsageError(f"This is {other}, schema {shown(found)}; what is asked for is {kind}, schema {schema!r}.")
    raise UsageError(
        f"This is {kind} of another version of recoup: its schema is {shown(found)}, and this one reads {schema!r}. "
        "Plan again with this version, or read it with the one that wrote it."
    )


_KINDS = {
    "recoup-plan": "a plan (recoup.Plan)",
    "recoup-jax-plan": "a plan of a JAX step (recoup.jax.JaxPlan)",
    "recoup-compiled-plan": "a plan of a compiled step (recoup.CompiledPlan)",
}


def read_fields(kind: type[T], data: Any, where: str, **ready: Any) -> T:
    """Returns an instance of a dataclass from a JSON object; fields with a default may be missing.

    Args:
        kind: the dataclass.
        data: the JSON object.
        where: what the object is, for messages.
        ready: fields that were read already.

    Raises:
        UsageError: for an unknown field, a missing one, or a value that does not fit.
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"{where} must be an object; got {shown(data)}.")
    of: Any = kind  # hashable, which mypy does not see of a class
    known: dict[str, Any] = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: _tuples(value) for name, value in data.items()} | ready
    for name in given:
        if name not in known:
            raise UsageError(f"{where}: it has no field {shown(name)}; its fields are {', '.join(known)}.")
    for name, field in known.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise UsageError(f"{where}: the field {name!r} is missing.")
        if name in given and name not in ready and not fits(given[name], hints_of(of)[name]):
            raise UsageError(f"{where}: {name} must be {said(hints_of(of)[name])}; got {shown(given[name])}.")
    return kind(**given)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
