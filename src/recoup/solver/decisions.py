"""From a solver's choice to a plan's decisions: the fewest that say it.

A decision holds for everything below its path until a deeper one takes over, so for each call the action of its own
leaves is compared with what it inherits; which action a call without a preference takes is chosen so that the fewest
decisions are needed below it. The calls of a span inherit from its decision, as the engine runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from recoup.ir.decision import Ambient, Decision, Offload, Recompute, Rederive, Save
from recoup.solver.problem import Leaf, Problem
from recoup.solver.sequence import Call, Choice, Line
from recoup.solver.ways import Move, Replay, Run

_AMBIENTS: tuple[Ambient, Ambient] = ("save", "rederive")
_Key = tuple[str, int]
_Group = tuple[Call, ...]


def decisions(problem: Problem, choice: Choice) -> tuple[Decision, ...]:
    """Returns the decisions of a choice over the whole problem, in call order; none for the plain step.

    Args:
        problem: what the choice was made for.
        choice: as a `Solution` or a `Baseline` holds it.
    """
    return to_decisions(Line(problem), choice)


def to_decisions(line: Line, choice: Choice) -> tuple[Decision, ...]:
    """Same as `decisions`, for a problem that is laid out already."""
    preference: dict[_Key, Ambient] = {}
    # How many calls each region covers, by the call it begins with; with nested spans there may be several of one
    # call, the outermost first.
    regions: dict[_Key, list[int]] = {}
    ways: dict[tuple[_Key, int], Replay | Move] = {}
    for leaf, run in _collect(line, choice, 0, regions, ways):
        has_wish = len(leaf.options) > 1 or leaf.options[0].ambient == "rederive"
        if has_wish and preference.get(leaf.owner) != "rederive":
            preference[leaf.owner] = run.ambient
    writer = _Writer(preference, regions, ways)
    return tuple(writer.write(line.root.parts))


def _collect(
    line: Line,
    choice: Choice,
    start: int,
    regions: dict[_Key, list[int]],
    ways: dict[tuple[_Key, int], Replay | Move],
) -> Iterator[tuple[Leaf, Run]]:
    for pick in choice:
        if isinstance(pick.way, Run):
            yield line.leaves[start + pick.first], pick.way
        else:
            block = line.calls(start + pick.first, pick.rank, 1)[0].block
            regions.setdefault((block.path, block.call), []).append(pick.num_calls)
            ways[(block.path, block.call), pick.num_calls] = pick.way
            yield from _collect(line, pick.inner, start + pick.first, regions, ways)


class _Writer:
    def __init__(
        self,
        preference: Mapping[_Key, Ambient],
        regions: Mapping[_Key, Sequence[int]],
        ways: Mapping[tuple[_Key, int], Replay | Move],
    ) -> None:
        self._ways = ways
        self._preference = preference
        self._regions = regions
        self._known: dict[tuple[_Key, Ambient], tuple[int, Ambient]] = {}

    def write(self, parts: Sequence[Leaf | Call], ambient: Ambient = "save") -> Iterator[Decision]:
        """Yields the decisions for `parts`, which inherit `ambient`."""
        for group in self._groups(parts):
            first = group[0].block
            inherited = ambient
            lengths = self._regions.get((first.path, first.call), ())
            if lengths:
                _, inherited = self._region_action(group)
            for length in lengths:
                paths = tuple(call.block.path for call in group[1:length])
                way = self._ways[(first.path, first.call), length]
                if isinstance(way, Move):
                    yield Offload(path=first.path, call=first.call, inside=inherited)
                    continue
                yield Recompute(
                    path=first.path,
                    call=first.call,
                    inside=inherited,
                    span=paths,
                    offload=way.offload,
                    keep=way.keep,
                )
            for call in group:
                _, action = self._best(call, inherited)
                block = call.block
                if call is not group[0] or not lengths:
                    yield from self._inner_regions(call, group, action)
                    if action != inherited:
                        yield (Rederive if action == "rederive" else Save)(path=block.path, call=block.call)
                yield from self.write(call.parts, action)

    def _inner_regions(self, call: Call, group: _Group, action: Ambient) -> Iterator[Decision]:
        """Yields the regions that begin at a call inside a span (nested spans only)."""
        if call is group[0]:
            return
        block = call.block
        rest = group[group.index(call) :]
        for length in self._regions.get((block.path, block.call), ()):
            paths = tuple(other.block.path for other in rest[1:length])
            yield Recompute(path=block.path, call=block.call, inside=action, span=paths)

    def _groups(self, parts: Sequence[Leaf | Call]) -> Iterator[_Group]:
        """Yields the calls of `parts`, those of one region together."""
        calls = [part for part in parts if isinstance(part, Call)]
        i = 0
        while i < len(calls):
            block = calls[i].block
            length = max(self._regions.get((block.path, block.call), (1,)))
            yield tuple(calls[i : i + length])
            i += length

    def _cost(self, parts: Sequence[Leaf | Call], ambient: Ambient) -> int:
        """Returns the number of decisions that `parts` need, without those of regions."""
        cost = 0
        for group in self._groups(parts):
            first = group[0].block
            if (first.path, first.call) in self._regions:
                cost += self._region_action(group)[0]
            else:
                cost += self._best(group[0], ambient)[0]
        return cost

    def _region_action(self, group: _Group) -> tuple[int, Ambient]:
        """Returns the number of decisions that a region's calls need, and the `inside` with the fewest."""
        first = group[0].block
        own = self._preference.get((first.path, first.call))
        options = [
            (sum(self._best(call, action)[0] for call in group), action != "save", action)
            for action in _AMBIENTS
            if own in (None, action)
        ]
        cost, _, action = min(options)
        return cost, action

    def _best(self, call: Call, ambient: Ambient) -> tuple[int, Ambient]:
        """Returns the number of decisions that `call` and its children need under `ambient`, and the call's action."""
        key = (call.block.path, call.block.call)
        known = self._known.get((key, ambient))
        if known is None:
            own = self._preference.get(key)
            options = [
                (int(action != ambient) + self._cost(call.parts, action), action != ambient, action)
                for action in _AMBIENTS
                if own in (None, action)
            ]
            cost, _, best = min(options)
            known = self._known[key, ambient] = (cost, best)
        return known
