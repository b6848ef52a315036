"""Reads the text of a TARGET; no torch, so that a typing mistake is answered at once."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

from recoup.errors import TargetError

DEFAULT_FUNCTION = "target"
_FUNCTION = re.compile(r"^[A-Za-z_]\w*$")
_MODEL_TYPE = re.compile(r"^[\w.-]+$")
_WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileTarget:
    """`FILE.py[:FUNCTION]`: a function that returns a dict with `model` and `batch`."""

    path: Path
    function: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HubTarget:
    """`hf:MODEL_TYPE?key=value&...`: a transformers configuration, random weights, nothing downloaded."""

    model_type: str
    overrides: tuple[tuple[str, Any], ...]


def parse_target(text: str) -> FileTarget | HubTarget:
    """Parses a TARGET.

    Raises:
        TargetError: if it is neither form, or the file is not there.
    """
    if text.startswith("hf:"):
        return _parse_hub(text)
    if text.startswith("jax:"):
        raise TargetError(
            f"The target {text!r} is a JAX step: `recoup plan`, `fit`, `frontier`, `profile` and `verify` take those. "
            "This command takes PyTorch models: FILE.py:FUNCTION or hf:MODEL_TYPE."
        )
    path_text, function = text, DEFAULT_FUNCTION
    if not text.endswith(".py") and ":" in text:
        path_text, function = text.rsplit(":", 1)
    if not path_text.endswith(".py"):
        raise TargetError(
            f"Cannot read the target {text!r}. Write FILE.py, FILE.py:FUNCTION or hf:MODEL_TYPE?key=value, "
            "for instance examples/unet.py or 'hf:gpt2?n_layer=6'."
        )
    if not _FUNCTION.match(function):
        raise TargetError(f"{function!r} in the target {text!r} is not a function name. Write FILE.py:FUNCTION.")
    path = Path(path_text)
    if not path.is_file():
        raise TargetError(f"No file {path_text!r} (looked in {Path.cwd()}). Check the path in the target {text!r}.")
    return FileTarget(path=path, function=function)


def _parse_hub(text: str) -> HubTarget:
    model_type, _, query = text.removeprefix("hf:").partition("?")
    if not _MODEL_TYPE.match(model_type):
        raise TargetError(
            f"The target {text!r} names no model type. Write hf:MODEL_TYPE?key=value&key=value, for instance "
            "'hf:gpt2?n_layer=6'."
        )
    overrides: dict[str, Any] = {}
    for item in _split(query):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or not value.strip():
            raise TargetError(f"Cannot read {item!r} in the target {text!r}. Write key=value, joined by & or commas.")
        if key in overrides:
            raise TargetError(f"{key!r} is given twice in the target {text!r}. Give it once.")
        overrides[key] = _value(value.strip())
    return HubTarget(model_type=model_type, overrides=tuple(overrides.items()))


def _split(query: str) -> list[str]:
    """Returns the items between `&` or commas; those inside brackets do not count: `depths=[3,4],num_labels=10`."""
    items, depth = [""], 0
    for character in query:
        depth += (character in "[(") - (character in "])")
        if character in "&," and depth <= 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items if item.strip()]


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
