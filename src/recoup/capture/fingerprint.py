"""What makes a model the one a plan was made for: module paths, classes, parameter shapes and dtypes."""

from __future__ import annotations

import hashlib

from torch import nn


def structure_of(model: nn.Module) -> dict[str, str]:
    """Returns what the fingerprint is made of: a line for each module and parameter, by path."""
    lines = {path or "(model)": type(module).__name__ for path, module in model.named_modules()}
    for path, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        lines[path] = f"{dtype} {list(parameter.shape)}"
    return lines


def fingerprint(model: nn.Module) -> str:
    """Returns a short hash of the model's structure; weights, device and train/eval flags do not count."""
    text = "\n".join(f"{path}: {what}" for path, what in structure_of(model).items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
