"""The moves of a line: every option of every leaf, and for every stretch the useful ways to run it as a region.

A region costs its replay; what happens inside the replay (save, rederive, regions again) trades its peak against more
time. The useful trades are found by solving the inside for a ladder of limits, once for each distinct structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recoup.solve.dynamic import REGION_TIE_SECONDS, Move, fastest, leanest
from recoup.solve.sequence import Line, Pick
from recoup.solve.simulate import evaluate, uniform

_LADDER = 6
_INNER_FRONT = 160


class Labels:
    """Moves of a line, inner plans shared between equal stretches."""

    def __init__(self, line: Line, *, actions: Sequence[str]) -> None:
        self.line = line
        self.actions = tuple(actions)
        self._inner: dict[Any, list[tuple[int, float, tuple[Pick, ...]]]] = {}
        self._moves: dict[tuple[int, int], list[Move]] = {}

    def moves(self, first: int, last: int) -> list[Move]:
        """Returns the moves inside leaves [first, last), relative to `first`, ordered by where they begin."""
        found = self._moves.get((first, last))
        if found is None:
            found = self._moves[first, last] = self._list(first, last)
        return found

    def _list(self, first: int, last: int) -> list[Move]:
        moves: list[Move] = []
        for i in range(first, last):
            at = i - first
            for option in self.line.leaves[i].options:
                if option.action != "save" and (option.action not in self.actions or i in self.line.in_hull):
                    continue
                moves.append(
                    Move(
                        at,
                        at + 1,
                        option.saved_bytes,
                        option.forward_bytes,
                        option.backward_bytes,
                        option.extra_seconds,
                        Pick(first=at, last=at + 1, action=option.action),
                    )
                )
            hull = self.line.hulls.get(i)
            if hull is not None and hull <= last and "rederive" in self.actions:
                moves.append(self._hull_move(i, hull, at))
            if "recompute" not in self.actions:
                continue
            for index in self.line.starting.get(i, ()):
                stretch = self.line.stretches[index]
                if stretch.last <= last and (stretch.first, stretch.last) != (first, last):
                    moves += self._region_moves(index, at)
        return moves

    def _hull_move(self, first: int, last: int, at: int) -> Move:
        """Returns the move that rederives a whole group of leaves."""
        line = self.line
        saved, forward, backward, seconds = 0, 0, 0, 0.0
        for i in range(first, last):
            leaf = line.leaves[i]
            option = next((o for o in leaf.options if o.action == "rederive"), leaf.options[0])
            after = int(line.gradient_sums[last] - line.gradient_sums[i + 1])
            forward = max(forward, saved + option.forward_bytes)
            backward = max(backward, saved + after + option.backward_bytes)
            saved += option.saved_bytes
            seconds += option.extra_seconds
        pick = Pick(first=at, last=at + last - first, action="rederive")
        return Move(at, at + last - first, saved, forward, backward, seconds, pick)

    def _region_moves(self, index: int, at: int) -> list[Move]:
        stretch = self.line.stretches[index]
        length = stretch.last - stretch.first
        moves = []
        for peak, seconds, inner in self.inner_plans(index):
            moves.append(
                Move(
                    at,
                    at + length,
                    stretch.saved_bytes,
                    stretch.forward_bytes,
                    stretch.saved_bytes + stretch.replay_bytes + peak,
                    stretch.seconds + seconds + REGION_TIE_SECONDS,
                    Pick(first=at, last=at + length, action="recompute", inner=inner, stretch=index),
                )
            )
        return moves

    def inner_plans(self, index: int) -> list[tuple[int, float, tuple[Pick, ...]]]:
        """Returns (peak, seconds, plan) for the inside of a stretch, leanest last, none dominated."""
        stretch = self.line.stretches[index]
        first, last = stretch.first, stretch.last
        key = self.line.structure(first, last)
        found = self._inner.get(key)
        if found is None:
            found = self._inner[key] = self._solve_inner(first, last, stretch.has_inner and len(stretch.blocks) == 1)
            return found
        return [(peak, seconds, self._rebase(plan, first)) for peak, seconds, plan in found]

    def _solve_inner(self, first: int, last: int, nested: bool) -> list[tuple[int, float, tuple[Pick, ...]]]:
        line = self.line
        plans = [uniform(line, first, last, "save")]
        if "rederive" in self.actions:
            plans.append(uniform(line, first, last, "rederive"))
        if nested and "recompute" in self.actions:
            moves = self.moves(first, last)
            high = min(evaluate(line, plan, start=first)[0] for plan in plans)
            low = smallest_limit(line, moves, first, last, high)
            for step in range(_LADDER):
                limit = low + (high - low) * step // _LADDER
                plan = fastest(
                    line, moves, first=first, last=last, limit_bytes=limit, max_front=_INNER_FRONT
                )
                if plan is not None:
                    plans.append(plan)
        priced = [(*evaluate(line, plan, start=first)[:2], plan) for plan in plans]
        priced.sort(key=lambda item: (item[1], item[0]))
        useful: list[tuple[int, float, tuple[Pick, ...]]] = []
        for peak, seconds, plan in priced:
            if not useful or peak < useful[-1][0]:
                useful.append((peak, seconds, plan))
        return useful

    def _rebase(self, plan: tuple[Pick, ...], first: int) -> tuple[Pick, ...]:
        """Returns a plan made for an equal stretch with its stretch numbers those found at `first`."""
        if all(pick.stretch < 0 for pick in plan):
            return plan
        rebased = []
        for pick in plan:
            if pick.stretch < 0:
                rebased.append(pick)
                continue
            old = self.line.stretches[pick.stretch]
            start = first + pick.first
            twin = next(
                i
                for i in self.line.starting[start]
                if self.line.stretches[i].last == first + pick.last
                and len(self.line.stretches[i].blocks) == len(old.blocks)
                and self.line.stretches[i].saved_bytes == old.saved_bytes
                and self.line.stretches[i].forward_bytes == old.forward_bytes
            )
            rebased.append(
                Pick(
                    first=pick.first,
                    last=pick.last,
                    action=pick.action,
                    inner=self._rebase(pick.inner, start),
                    stretch=twin,
                )
            )
        return tuple(rebased)


def smallest_limit(line: Line, moves: Sequence[Move], first: int, last: int, high: int) -> int:
    """Returns the smallest limit, to one part in 4000 of `high`, that some choice meets; `high` must be met by one."""
    low, step = 0, max(high // 4000, 1)
    while high - low > step:
        middle = (low + high) // 2
        if leanest(line, moves, first=first, last=last, limit_bytes=middle):
            high = middle
        else:
            low = middle
    return high
