"""Which op a mark of a plan by tensor means: calls in progress, and how their ops are numbered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup.ir.decision import OpMark


def marks_of(marks: Sequence[OpMark]) -> dict[tuple[str, int], dict[int, OpMark]]:
    """Returns marks by module path and call, then by ordinal."""
    found: dict[tuple[str, int], dict[int, OpMark]] = {}
    for mark in marks:
        found.setdefault((mark.path, mark.call), {})[mark.ordinal] = mark
    return found


class Frame:
    """One call that runs now.

    Attributes:
        ordinal: how many of its own ops have run, of those that marks count.
        missed: the mark in whose place another op stood.
    """

    __slots__ = ("marks", "missed", "ordinal", "path")

    def __init__(self, path: str, marks: dict[int, OpMark] | None) -> None:
        self.path = path
        self.marks = marks
        self.ordinal = 0
        self.missed: OpMark | None = None


def reads_numbers(args: Sequence[Any]) -> bool:
    """Whether an op is handed a tensor of floating-point or complex numbers: others have no number in their call.

    Code that asks about integers or masks may do so in a step and not while it is captured. Views have none either:
    after a write through a view, autograd makes the views of fake tensors again, and those of real ones not.
    """
    for item in args:
        if isinstance(item, torch.Tensor):
            if item.dtype.is_floating_point or item.dtype.is_complex:
                return True
        elif isinstance(item, (list, tuple)) and reads_numbers(item):
            return True
    return False
