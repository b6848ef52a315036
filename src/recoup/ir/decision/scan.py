"""Scan: in how many bytes a `recoup.recurrent.scan` of a call's own forward runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from recoup.ir.decision.base import Decision
from recoup.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan(Decision):
    """The bytes of one scan. The call is no region: steps of the scan run again, as many as those bytes require.

    Attributes:
        index: which scan of the call, counted from 0 in the order they begin; those in calls inside of it count too.
        budget_bytes: what the scan may take, as its `budget=`; with more than all its steps taped need, none runs
            twice.
    """

    action: ClassVar[str] = "scan"
    verb: ClassVar[str] = "recompute"

    index: int
    budget_bytes: int

    def check(self) -> None:
        """Raises UsageError if there can be no such scan, or it gets no bytes."""
        self.require_at_least(0, "index")
        self.require_at_least(1, "budget_bytes")

    def words(self) -> str:
        """Returns the action in words, without its place."""
        return f"scan {self.index} in {format_bytes(self.budget_bytes)}"

    @classmethod
    def kinds(cls, members: Sequence[Self]) -> list[list[Self]]:
        """Returns each scan alone."""
        return [[scan] for scan in members]

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line for each scan; which one it is, where its call runs several."""
        lines = []
        for scan in members:
            others = sum((d.path, d.call) == (scan.path, scan.call) for d in members)
            which = f"scan {scan.index}" if others > 1 or scan.index else "the scan"
            call = "" if scan.call is None else f", call {scan.call}"
            where = scan.path or "(the model)"
            lines.append(f"recompute steps of {which} of {where}{call} in {format_bytes(scan.budget_bytes)}")
        return lines
