"""The problem laid out in a line: leaves in forward order, and the stretches of them that may become regions.

Blocks that are no region are their parts inlined, so a plan is a walk over the line: single leaves, each with one of
its options, and jumps over stretches that are regions. `Pick` is one such move; offsets are relative to the start of
the enclosing stretch, so that equal stretches share their plans.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from recoup.solve.problem import Block, Leaf, Problem

# Spans of consecutive calls are tried at these lengths (and at the whole chain): enough for any segment length within
# a factor of about 1.3, without a quadratic number of stretches.
SPAN_LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
MAX_HULL = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Leaves [first, last) that may become one region.

    `blocks` are the calls it covers: one, or several for a span. The prices are those of `problem.Region`, combined.
    """

    first: int
    last: int
    blocks: tuple[Block, ...]
    saved_bytes: int
    forward_bytes: int
    replay_bytes: int
    seconds: float
    flops: int
    has_inner: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """One move of a plan over leaves [first, last), relative to the enclosing stretch.

    `action` is a leaf's option, or "recompute" with the plan inside as `inner` and the stretch's blocks.
    """

    first: int
    last: int
    action: str
    inner: tuple[Pick, ...] = ()
    stretch: int = -1


class Line:
    """A problem laid out.

    Attributes:
        leaves: in forward order. stretches: candidates for regions, grouped by where they begin in `starting`.
        gradient_sums: gradient bytes of leaves [0, i), so that those of a stretch are one subtraction.
    """

    def __init__(self, problem: Problem, *, regions: bool = True, spans: bool = True) -> None:
        self.problem = problem
        self.leaves: list[Leaf] = []
        self.stretches: list[Stretch] = []
        self._with_regions = regions
        self._spans = spans
        self._lay(problem.parts)
        gradients = [leaf.gradient_bytes for leaf in self.leaves]
        self.gradient_sums: npt.NDArray[np.int64] = np.concatenate(
            [np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(gradients, dtype=np.int64))]
        )
        total = sum(leaf.options[0].saved_bytes for leaf in self.leaves)
        self.stretches = [s for s in self.stretches if self._is_part(s, total)]
        ends: dict[int, list[int]] = {}
        for position, leaf in enumerate(self.leaves):
            if leaf.group >= 0:
                ends.setdefault(leaf.group, [position, position])[1] = position
        # A group's hull: its leaves are rederived by one move. A hull of half the step would leave no choice at all.
        self.hulls = {
            first: last + 1 for first, last in ends.values() if last - first < max(MAX_HULL, len(self.leaves) // 8)
        }
        self.in_hull = {
            position: (first, last) for first, last in self.hulls.items() for position in range(first, last)
        }
        self.starting: dict[int, list[int]] = {}
        for index, stretch in enumerate(self.stretches):
            self.starting.setdefault(stretch.first, []).append(index)

    def _is_part(self, stretch: Stretch, total_bytes: int) -> bool:
        """A region over nearly everything frees nothing at the peak: its replay holds it all again."""
        inside = sum(leaf.options[0].saved_bytes for leaf in self.leaves[stretch.first : stretch.last])
        return inside > 0 and not (stretch.has_inner and inside > 0.8 * total_bytes)

    def _lay(self, parts: tuple[Leaf | Block, ...]) -> bool:
        """Appends the parts; returns whether any stretch was found inside."""
        found = False
        chain: list[tuple[Block, int, int, bool]] = []
        for part in parts:
            if isinstance(part, Leaf):
                self.leaves.append(part)
                continue
            first = len(self.leaves)
            inner = self._lay(part.parts)
            found = found or inner
            last = len(self.leaves)
            if not part.chained:
                self._add_spans(chain)
                chain = []
            if part.region is None or not self._with_regions or last == first:
                self._add_spans(chain)
                chain = []
                continue
            found = True
            self._add((part,), first, last, inner)
            chain.append((part, first, last, inner))
        self._add_spans(chain)
        return found

    def _add_spans(self, chain: list[tuple[Block, int, int, bool]]) -> None:
        if not self._spans or len(chain) < 2:
            return
        for start in range(len(chain)):
            for length in SPAN_LENGTHS:
                if start + length > len(chain):
                    break
                members = chain[start : start + length]
                if members[0][1] != members[0][2] and all(
                    a[2] == b[1] for a, b in zip(members, members[1:], strict=False)
                ):
                    self._add(tuple(m[0] for m in members), members[0][1], members[-1][2], True)

    def _add(self, blocks: tuple[Block, ...], first: int, last: int, has_inner: bool) -> None:
        regions = [b.region for b in blocks if b.region is not None]
        self.stretches.append(
            Stretch(
                first=first,
                last=last,
                blocks=blocks,
                saved_bytes=regions[0].saved_bytes,
                forward_bytes=max(r.forward_bytes for r in regions),
                replay_bytes=regions[0].replay_bytes,
                seconds=sum(r.seconds for r in regions),
                flops=sum(r.flops for r in regions),
                has_inner=has_inner,
            )
        )

    def structure(self, first: int, last: int) -> Any:
        """Returns something hashable, equal for stretches with the same numbers."""
        leaves = tuple((leaf.options, leaf.gradient_bytes) for leaf in self.leaves[first:last])
        hulls = tuple((a - first, self.hulls[a] - first) for a in range(first, last) if a in self.hulls)
        inner = tuple(
            (s.first - first, s.last - first, s.saved_bytes, s.forward_bytes, s.replay_bytes, round(s.seconds, 9), s.flops)
            for start in range(first, last)
            for s in (self.stretches[i] for i in self.starting.get(start, ()))
            if s.last <= last
        )
        return leaves, hulls, inner
