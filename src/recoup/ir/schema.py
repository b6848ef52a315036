"""The JSON schema of plan files, from the dataclasses themselves, so that the two cannot drift apart."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from recoup.ir.decision import DECISIONS, Decision, OpMark
from recoup.ir.plan import SCHEMA, Plan, Prediction

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean"}


def plan_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of what `Plan.save` writes."""
    plan = _of_class(Plan)
    plan["properties"] = {"schema": {"const": SCHEMA}, **plan["properties"]}
    plan["required"] = ["schema", *plan["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recoup plan",
        "description": "Which action each call of a training step gets. Sizes are bytes, times are seconds.",
        **plan,
        "$defs": {
            "Decision": {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in DECISIONS]},
            **{kind.__name__: _of_decision(kind) for kind in DECISIONS},
            "OpMark": _of_class(OpMark),
            "Prediction": _of_class(Prediction),
        },
    }


def _of_decision(kind: type[Decision]) -> dict[str, Any]:
    found = _of_class(kind)
    found["properties"] = {"action": {"const": kind.action}, **found["properties"]}
    found["required"] = ["action", *found["required"]]
    return found


def _of_class(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {field.name: _of_type(hints[field.name]) for field in fields},
        # A file always holds every field; those with a default may be missing in one written by hand.
        "required": [f.name for f in fields if f.default is dataclasses.MISSING],
    }


def _of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(a) for a in arguments]}
    if hint is type(None):
        return {"type": "null"}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _of_type(arguments[0])}
    if origin is tuple:
        items = [_of_type(a) for a in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if dataclasses.is_dataclass(hint):
        return {"$ref": f"#/$defs/{typing.cast(type, hint).__name__}"}
    raise TypeError(f"no schema for {hint!r}")
