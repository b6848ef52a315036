"""From a problem to its front: walks the calls from the last to the first, regions solved inside first.

A region's inside is a sequence of its own, solved the same way, once for each distinct structure: 32 equal layers are
one. Spans (one region over consecutive calls) are tried at every length up to 16 and from there on at
lengths that grow by a sixteenth to an eighth. Depth of recursion is depth of nesting, never number of layers.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from recoup.solver.pareto import (
    Front,
    before_leaves,
    before_region,
    best_of,
    composed,
    empty,
    region_step,
    regions_within,
)
from recoup.solver.rederive_coupling import Linked, Links, forks
from recoup.solver.reference import option_of
from recoup.solver.sequence import Call, Line, PricedSpan, saves_moved, spans_over
from recoup.solver.stages import Stages, Stop, Stretch
from recoup.solver.ways import Move, Replay, Run

_LONGEST_SPAN_CALLS = 32  # at least, see `Search`
_MOST_POINTS = 4096  # of the front of a step
_PLAIN = Replay()
_Units = frozenset[int]


def is_tried(length: int) -> bool:
    """Whether spans of this many calls are tried: all up to 16, longer ones in steps of a sixteenth to an eighth."""
    return length % (1 << max(length.bit_length() - 4, 0)) == 0


def is_tried_inside(length: int) -> bool:
    """Whether spans of this many calls are tried inside spans: in steps of a quarter to a half."""
    return length % (1 << max(length.bit_length() - 2, 0)) == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inside:
    """Consecutive calls as a sequence of their own: the inside of a region.

    Attributes:
        structure: equal for equal numbers.
        front: as the inside of a region over them.
        sequence: as a part of a longer inside; with nested spans, all of them may be one region there.
    """

    structure: int
    front: Front
    sequence: Front


def _calls(call: Call) -> Iterator[Call]:
    yield call
    for part in call.parts:
        if isinstance(part, Call):
            yield from _calls(part)


def _num_in_a_row(call: Call) -> int:
    """Returns how many calls among a call's parts follow one another, at most."""
    groups = itertools.groupby(call.parts, key=lambda part: isinstance(part, Call))
    return max((len(list(group)) for are_calls, group in groups if are_calls), default=0)


class Search:
    """Fronts of a line under a set of actions.

    Args:
        line: the problem, laid out.
        actions: what may be chosen besides "save".
        spans: whether consecutive calls may form one region.
        nested_spans: whether the calls inside a span may be regions, and spans, again (Rotor's full recursion).
        max_points, max_inner_points: how large fronts may grow, of the step (None: by the size of the line) and inside
            regions.
    """

    def __init__(
        self,
        line: Line,
        *,
        actions: Sequence[str],
        spans: bool,
        nested_spans: bool,
        max_points: int | None = None,
        max_inner_points: int = 100,
    ) -> None:
        self._line = line
        self._actions = frozenset(actions) | {"save"}
        self._spans = spans
        self._nested_spans = nested_spans
        self._max_points = max_points or _MOST_POINTS
        self._max_inner_points = max_inner_points
        # Each open unit doubles the states at a leaf: together as many as a front has points.
        self._most_open = max(_MOST_POINTS // max(len(line.leaves), 1), 1).bit_length() - 1
        self._inside: dict[tuple[int, int], _Inside] = {}
        # Lists of insides are one object if they are equal, so that `id` tells; `_known_insides` holds them.
        self._none_following: list[_Inside] = []
        self._known_insides: dict[tuple[int, ...], list[_Inside]] = {}
        self._same_insides: dict[tuple[int, int], list[_Inside]] = {}
        self._linked: dict[tuple[int, int], Front] = {}
        self._known_links: dict[Hashable, Linked] = {}
        self._links_of: dict[int, Links | None] = {}
        self._spans_of_call: dict[int, list[PricedSpan | None]] = {}  # by identity of the first call
        self._spans_before: dict[tuple[int, int], list[PricedSpan | None]] = {}  # by identity of the next call's
        self._known_spans: dict[tuple[int, ...], list[PricedSpan | None]] = {}  # by structures of all calls
        self._priced_spans: dict[tuple[int, ...], PricedSpan | None] = {}
        self._nothing = empty()
        calls = list(_calls(line.root))
        # Segments of a chain of n calls are best at about sqrt(n); three times that leaves room for unequal ones.
        self._longest_span = max(_LONGEST_SPAN_CALLS, 3 * math.isqrt(max(_num_in_a_row(call) for call in calls)))
        self._stages = Stages(
            line,
            actions=self._actions,
            forking={unit for call in calls for unit in self._reaches(call, len(call.parts))},
            linking={unit for call in calls for unit in self._reaches(call, self._longest_span)},
        )
        self.num_thinned = 0

    def front(self) -> Front:
        """Returns the front of the whole step, above its fixed bytes."""
        walked = self._walk(self._line.root, {frozenset(): self._nothing}, 0, self._max_points, outermost=True)
        return walked[frozenset()]

    def _best_of(self, fronts: Sequence[Front], max_points: int) -> Front:
        front = best_of(fronts, max_points)
        self.num_thinned += front.num_thinned
        return front

    def _walk(
        self, call: Call, after: Mapping[_Units, Front], first: int, max_points: int, *, outermost: bool = False
    ) -> Mapping[_Units, Front]:
        """Returns the fronts of a call followed by `after`, both by the units that rederive and begin before it.

        Args:
            first: where the sequence begins that the call is part of; units that begin before it fork no walk.
            outermost: whether no region is around it: what a replay saves does not go to the host.
        """
        stages = self._stages.of(call)
        # fronts[i] are those of stages i and on; a span jumps from one to one further right.
        fronts: list[Mapping[_Units, Front]] = [{}] * len(stages) + [after]
        insides: dict[int, list[_Inside]] = {}
        for i in reversed(range(len(stages))):
            stage, rest = stages[i], fronts[i + 1]
            if isinstance(stage, Stretch):
                found = self._leaves(stage, rest, first)
            else:
                if stage.is_region:
                    insides[i] = self._insides(stage, i, insides)
                walked = self._walk(stage.call, rest, first, max_points, outermost=outermost)
                found = {state: [front] for state, front in walked.items()}
                for state, front in rest.items():
                    if outermost and stage.call.block.offloads and state in found:
                        found[state] += self._offloads(stage.call, front, state)
                    inner: list[Front] = []
                    jumps: list[Front] = []
                    for inside, behind in zip(insides.get(i, ()), fronts[i + 1 :], strict=False):
                        last = stages[i + len(inner)]
                        assert isinstance(last, Stop), "a span runs over calls"
                        if state and any(self._line.is_touched(u, stage.call.first, last.call.last) for u in state):
                            break  # a region would take some of a unit's leaves and leave others
                        inner.append(inside.front)
                        jumps.append(behind[state])
                    if inner:
                        found[state] += self._regions(stage.call, inner, jumps, walked[state], outermost=outermost)
            fronts[i] = {state: self._best_of(candidates, max_points) for state, candidates in found.items()}
        return fronts[0]

    def _leaves(self, stretch: Stretch, after: Mapping[_Units, Front], first: int) -> dict[_Units, list[Front]]:
        """Returns the fronts of some leaves followed by `after`, by the units that rederive and begin before them."""
        opening = [unit for begin, unit in stretch.opening if begin >= first]
        found: dict[_Units, list[Front]] = {}
        for state, front in after.items():
            for forked in forks(state, opening) if opening else (state,):
                candidates = found.setdefault(forked - stretch.closing, [])
                candidates += [before_leaves(front, leaves) for leaves in self._stages.composed(stretch, forked)]
        return found

    def _links(self, call: Call) -> Links | None:
        """Returns the coupling of a call's parts, None if there is none."""
        if id(call) in self._links_of:
            return self._links_of[id(call)]
        reaches = self._reaches(call, self._longest_span) if self._spans and "recompute" in self._actions else {}
        if not reaches:
            self._links_of[id(call)] = None
            return None

        def walk(part: Call, after: Mapping[_Units, Front]) -> Mapping[_Units, Front]:
            return self._walk(part, after, part.first, self._max_inner_points)

        found = self._links_of[id(call)] = Links(
            call.parts, reaches, walk=walk, structure=self._line.structure, known=self._known_links
        )
        return found

    def _reaches(self, call: Call, longest: int) -> dict[int, tuple[int, int]]:
        """Returns the first and the last part that each unit of a call touches, for those that may rederive.

        So many are open at a time as `_most_open` says, those that free the most bytes; the rest save.

        Args:
            longest: how many parts a unit may reach over.
        """
        reaches: dict[int, tuple[int, int]] = {}
        if "rederive" not in self._actions:
            return reaches
        starts = call.starts
        num_open = [0] * len(starts)
        for unit in sorted(call.units, key=self._freed_bytes, reverse=True):
            positions = self._line.units[unit]
            first = bisect.bisect_right(starts, positions[0]) - 1
            last = bisect.bisect_right(starts, positions[-1]) - 1
            if last - first < longest and max(num_open[first : last + 1]) < self._most_open:
                reaches[unit] = (first, last)
                for i in range(first, last + 1):
                    num_open[i] += 1
        return reaches

    def _freed_bytes(self, unit: int) -> int:
        leaves = [self._line.leaves[i] for i in self._line.units[unit]]
        return sum(leaf.options[0].saved_bytes - leaf.options[-1].saved_bytes for leaf in leaves)

    def _regions(
        self,
        call: Call,
        inner: Sequence[Front],
        after: Sequence[Front],
        rival: Front,
        tried: Callable[[int], bool] = is_tried,
        *,
        outermost: bool = False,
    ) -> list[Front]:
        """Returns the fronts of regions that begin at `call`: over n calls, with inner[n - 1], before after[n - 1].

        Args:
            rival: of the same calls; a region with no point that it does not dominate is left out.
        """
        steps = []
        spans = self._spans_from(call, len(inner))
        for length, (inside, rest) in enumerate(zip(inner, after, strict=True), start=1):
            span = spans[length - 1]
            if span is None or not tried(length):
                continue
            prices = span.prices if outermost else ((_PLAIN, span.plain),)
            steps += [
                region_step(rest, region, inside, num_leaves=span.num_leaves, rank=call.rank, num_calls=length, way=way)
                for way, region in prices
            ]
        return regions_within(steps, rival)

    def _spans_from(self, call: Call, longest: int) -> list[PricedSpan | None]:
        """Returns the prices of regions over 1, 2, ... calls from `call` on, `longest` at least, and their leaves."""
        known = self._spans_of_call.get(id(call))
        if known is None or len(known) < longest:
            behind = call.following and self._spans_of_call.get(id(call.following))
            same = self._spans_before.get((call.structure, id(behind))) if behind else None
            if same is not None and len(same) >= longest:
                self._spans_of_call[id(call)] = same
                return same
            calls, last = [call], call
            while last.following is not None and len(calls) < max(longest, self._longest_span):
                last = last.following
                if last.block.region is None:
                    break
                calls.append(last)
            # Equal calls in the same order are priced once, wherever they lie.
            key = tuple(c.structure for c in calls)
            known = self._known_spans.get(key)
            if known is None:
                known = self._known_spans[key] = self._spans_over(calls, key)
            self._spans_of_call[id(call)] = known
            if behind:
                self._spans_before[call.structure, id(behind)] = known
        return known

    def _spans_over(self, calls: Sequence[Call], structures: tuple[int, ...]) -> list[PricedSpan | None]:
        """Returns the regions over the first, the first two, ... calls; None where they are not tried."""
        tried = [length for length in range(1, len(calls) + 1) if is_tried(length)]
        new = [length for length in tried if structures[:length] not in self._priced_spans]
        for length, span in spans_over(calls, new).items():
            self._priced_spans[structures[:length]] = span
        found: list[PricedSpan | None] = [None] * len(calls)
        for length in tried:
            found[length - 1] = self._priced_spans[structures[:length]]
        return found

    def _offloads(self, call: Call, after: Front, rederived: _Units) -> list[Front]:
        """Returns the fronts of a call whose saved tensors go to the host, all its leaves running alike."""
        if any(self._line.is_touched(u, call.first, call.last) for u in rederived):
            return []
        fronts = []
        for offload in call.block.offloads:
            leaves = self._line.leaves[call.first : call.last]
            options = [(option_of(leaf, Run(offload.inside)), leaf.gradient_bytes) for leaf in leaves]
            inner = before_leaves(self._nothing, composed(options, ties=False))
            fronts.append(
                before_region(
                    region_step(
                        after,
                        saves_moved(offload),
                        inner,
                        num_leaves=call.last - call.first,
                        rank=call.rank,
                        num_calls=1,
                        way=Move(offload.inside),
                    )
                )
            )
        return fronts

    def _insides(self, stop: Stop, i: int, known: Mapping[int, list[_Inside]]) -> list[_Inside]:
        """Returns the insides of regions over 1, 2, ... calls, the first of which is stage `i` of a walk.

        Args:
            known: the same for the stages behind it.
        """
        call, links = stop.call, self._links(stop.around)
        following = known[i + 1] if call.following is not None and self._spans else self._none_following
        if links is None:  # in a long chain of equal calls what follows is mostly the same
            same = self._same_insides.get((call.structure, id(following)))
            if same is not None:
                return same
        found: list[_Inside] = []
        for length in range(1, min(len(following) + 1, self._longest_span) + 1):
            key = (call.structure, following[length - 2].structure if length > 1 else -1)
            inside = self._inside.get(key)
            if inside is None:
                after = following[length - 2].sequence if length > 1 else self._nothing
                walked = self._walk(call, {frozenset(): after}, call.first, self._max_inner_points)
                fronts = [walked[frozenset()]]
                if self._nested_spans and length > 1:
                    behind = [known[i + k][length - k - 1].sequence for k in range(1, length)]
                    fronts += self._regions(call, [other.front for other in found], behind, fronts[0], is_tried_inside)
                front = sequence = self._best_of(fronts, self._max_inner_points)
                if self._nested_spans and is_tried(length):
                    inner = [*(o.front for o in found), front]
                    whole = self._regions(call, inner, [self._nothing] * length, front, length.__eq__)
                    sequence = self._best_of([front, *whole], self._max_inner_points)
                structure = self._line.structure(("inside", *key))
                inside = self._inside[key] = _Inside(structure=structure, front=front, sequence=sequence)
            if length > 1 and links is not None:
                inside = self._with_links(links, stop.index, length, inside)
            found.append(inside)
        if links is None:
            found = self._known_insides.setdefault(tuple(inside.structure for inside in found), found)
            self._same_insides[call.structure, id(following)] = found
        return found

    def _with_links(self, links: Links, i: int, length: int, inside: _Inside) -> _Inside:
        """Returns the inside of a span in which units that link its calls may rederive too."""
        linked = links.extend(i, length)
        if not is_tried(length):
            return inside
        key = (inside.structure, linked.structure)
        front = self._linked.get(key)
        if front is None:
            front = self._best_of([inside.front, linked.fronts[frozenset()]], self._max_inner_points)
            self._linked[key] = front
        return dataclasses.replace(inside, front=front)
