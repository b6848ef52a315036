"""From a solver's choice to a plan's decisions: the fewest that say it.

A decision holds for everything below its path until a deeper one takes over, so for each call the action of its own
leaves is compared with what it inherits; which action a call without a preference takes is chosen so that the fewest
decisions are needed below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from recoup.ir.plan import Decision
from recoup.solve.problem import Block, Leaf, Problem
from recoup.solve.sequence import Line, Pick

Ambient = Literal["save", "rederive"]
_AMBIENTS: tuple[Ambient, Ambient] = ("save", "rederive")
_Key = tuple[str, int]


def to_decisions(line: Line, choice: Sequence[Pick]) -> tuple[Decision, ...]:
    """Returns the decisions of a choice over the whole line, in call order."""
    wanted: dict[int, str] = {}
    spans: dict[_Key, tuple[str, ...]] = {}
    _collect(line, choice, 0, wanted, spans)
    preference: dict[_Key, Ambient] = {}
    for i, leaf in enumerate(line.leaves):
        if len(leaf.options) > 1:
            action: Ambient = "rederive" if wanted[i] == "rederive" else "save"
            if preference.get(leaf.owner) != "rederive":  # one action a call: the leaner one
                preference[leaf.owner] = action
    writer = _Writer(preference, spans)
    return writer.write(line.problem)


def _collect(
    line: Line, choice: Sequence[Pick], start: int, wanted: dict[int, str], spans: dict[_Key, tuple[str, ...]]
) -> None:
    for pick in choice:
        if pick.action == "recompute":
            blocks = line.stretches[pick.stretch].blocks
            spans[blocks[0].path, blocks[0].call] = tuple(b.path for b in blocks[1:])
            _collect(line, pick.inner, start + pick.first, wanted, spans)
        else:
            wanted.update(dict.fromkeys(range(start + pick.first, start + pick.last), pick.action))


class _Writer:
    def __init__(self, preference: Mapping[_Key, Ambient], spans: Mapping[_Key, tuple[str, ...]]) -> None:
        self._preference = preference
        self._spans = spans
        self._memo: dict[tuple[_Key, Ambient], tuple[int, Ambient]] = {}

    def write(self, problem: Problem) -> tuple[Decision, ...]:
        found: list[Decision] = []
        for part in problem.parts:
            if isinstance(part, Block):
                self._emit(part, "save", found, inherited_from_span=None)
        return tuple(found)

    def _best(self, block: Block, ambient: Ambient) -> tuple[int, Ambient]:
        """Returns how many decisions `block` and what is below need under `ambient`, and the action it takes."""
        key = ((block.path, block.call), ambient)
        known = self._memo.get(key)
        if known is not None:
            return known
        is_region = key[0] in self._spans
        options: list[tuple[int, int, Ambient]] = []
        for action in _AMBIENTS:
            if self._preference.get(key[0], action) != action:
                continue
            below = sum(self._best(p, action)[0] for p in block.parts if isinstance(p, Block))
            own = 1 if is_region else int(action != ambient)
            options.append((own + below, int(action != ambient), action))
        cost, _, action = min(options)
        self._memo[key] = (cost, action)
        return cost, action

    def _emit(
        self, block: Block, ambient: Ambient, found: list[Decision], inherited_from_span: Ambient | None
    ) -> None:
        key = (block.path, block.call)
        span = self._spans.get(key)
        _, action = self._best(block, ambient)
        if span is not None:
            found.append(
                Decision(path=block.path, call=block.call, action="recompute", inside=action, span=span)
            )
        elif action != ambient:
            found.append(Decision(path=block.path, call=block.call, action=action))
        for part in block.parts:
            if isinstance(part, Block):
                self._emit(part, action, found, None)


def leaves_of(parts: Sequence[Leaf | Block]) -> list[Leaf]:
    """Returns the leaves of parts in order."""
    found: list[Leaf] = []
    for part in parts:
        if isinstance(part, Leaf):
            found.append(part)
        else:
            found += leaves_of(part.parts)
    return found
