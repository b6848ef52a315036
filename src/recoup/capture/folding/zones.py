"""The calls of a loop that are folded, and the facts about a step's loops that captures share."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from recoup.ir.decision import Loop, Region, Scan, Tile
from recoup.runtime.patch import find_patch
from recoup.solver.loops import FEWEST_CALLS

RUN_STEPS = 4  # first ones of a loop, and last ones, that always run: calls, or chunks of them


class Irregular(BaseException):
    """The calls of a loop differ; has the loop and the reason. The step is then captured without folding.

    A BaseException, so that no `except Exception` of the model catches it.

    Attributes:
        path: of the module; "" if it is not known which loop it was.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class Counted(BaseException):
    """A forward that was run to count the calls of loops has ended. A BaseException, as `Irregular`."""


@dataclasses.dataclass
class FoldingMemory:
    """A step's loops as earlier captures found them.

    Attributes:
        num_calls: of each module path that may be folded.
        excluded: paths of loops whose calls differ.
        reasons: why captures of the step were not folded, in words.
        recounts: how often the numbers of calls had changed.
    """

    num_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    excluded: set[str] = dataclasses.field(default_factory=set)
    reasons: list[str] = dataclasses.field(default_factory=list)
    recounts: int = 0

    def exclude(self, path: str) -> bool:
        """Excludes a loop from folding, all of them for ""; returns whether anything changed."""
        gone = {path} if path else set(self.num_calls)
        is_news = not gone <= self.excluded
        self.excluded |= gone
        for name in gone:
            self.num_calls.pop(name, None)
        return is_news


@dataclasses.dataclass(frozen=True, slots=True)
class Zone:
    """Calls `start` to `stop` of a loop, repeating every `period` calls (a chunk); `low` to `high` are folded."""

    start: int
    stop: int
    period: int
    low: int
    high: int


def find_chunks(modules: dict[str, nn.Module], path: str, num_calls: int) -> tuple[int, int] | None:
    """Returns the calls per chunk under the applied plan, and how many calls are in chunks.

    (1, 0) without a plan for the module; None if the plan treats single calls differently, or has the module in a
    larger region.
    """
    chunked: list[Any] = []
    for name, module in modules.items():
        patched = find_patch(module)
        decisions = getattr(patched.settings, "decisions", ()) if patched is not None else ()
        if patched is None or (not decisions and not getattr(patched.settings, "joins", ())):
            continue
        if name == path:
            chunked = [d for d in decisions if isinstance(d, Loop)]
        is_around = not name or path.startswith(f"{name}.")
        if is_around and name != path and any(isinstance(d, Region | Scan | Tile) for d in decisions):
            return None
        is_inside = name == path or name.startswith(f"{path}.")
        if is_inside and (patched.settings.joins or any(d.call is not None or len(d.paths) > 1 for d in decisions)):
            return None
    if not chunked:
        return 1, 0
    if len(chunked) > 1:
        return None
    return chunked[0].chunk, num_calls if chunked[0].calls is None else min(chunked[0].calls, num_calls)


def find_zones(num_calls: int, chunk: int, chunked_calls: int) -> list[Zone]:
    """Returns the parts of a loop in which calls are folded."""
    zones = []
    for start, stop, period in ((0, chunked_calls, chunk), (chunked_calls, num_calls, 1)):
        first, last = RUN_STEPS if period == 1 else RUN_STEPS // 2, RUN_STEPS
        units = (stop - start) // period
        if period > 1 and (stop - start) % period > 1:  # the last chunk is a shorter one
            last -= 1 if stop == num_calls else 2
        elif period > 1 and stop < num_calls:
            last -= 1
        low, high = start + first * period, start + (units - last) * period
        if high - low >= max(FEWEST_CALLS - 2 * RUN_STEPS, period):
            zones.append(Zone(start, stop, period, low, high))
    return zones
