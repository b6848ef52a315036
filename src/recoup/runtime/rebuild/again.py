"""Ops that run again as something cheaper, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context


def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns `aten._safe_softmax`: a softmax, with zeros in the rows that are masked as a whole.

    Looking for such rows takes most of the op on a CPU. In a plain softmax they are NaN, from their first number on; so
    the op itself runs only where there is a NaN.
    """
    if dtype is None and x.numel() and execution_context.device_type(x) == "cpu":
        out: torch.Tensor = torch.softmax(x, dim)
        if _torch.is_fake(x) or not math.isnan(float(out.select(dim, 0).sum())):  # none is below zero: NaN stays NaN
            return out
    found: torch.Tensor = torch.ops.aten._safe_softmax.default(x, dim, dtype)
    return found


AGAIN: Mapping[str, Callable[..., Any]] = MappingProxyType({"aten._safe_softmax.default": safe_softmax})
"""By label, what computes the same as an op does, for less where its like ran before."""
