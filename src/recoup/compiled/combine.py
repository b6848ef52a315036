"""One budget over all graphs of a compiled step: which choice each call of a graph gets.

Forward runs the calls of graphs in order, backward in reverse. A call's level is that of all calls before it: what
they hold, and what they return (the next one's input); in backward also the gradients of those after it. Where the
levels of a step that ran are known, those are taken, eager code between calls included, and changed by what a choice
holds more or less than that step's. Calls of one graph share a choice, or, where modules of their own make them, a few.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

from recoup.compiled.joint_step import JointStep
from recoup.compiled.mixtures import Base, Mixtures
from recoup.compiled.schedule import Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A choice for each call, in forward's order. `peak_bytes` is that of all calls, `seconds` what runs again."""

    chosen: tuple[Timeline, ...]
    peak_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLevels:
    """Bytes above those before the step, as they were metered while a step ran by `chosen`, a choice for each call.

    Attributes:
        forward, backward: for each call, in forward's order, the highest one while its forward and its backward run.
        between: for n from 0 the highest level outside of calls while n of them hold what backward reads.
    """

    chosen: tuple[Timeline, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    between: tuple[int, ...]


def combined(
    steps: Mapping[str, JointStep],
    calls: Sequence[str],
    chosen: Sequence[Timeline],
    levels: StepLevels | None = None,
) -> Combination:
    """Returns the peak and seconds of a choice for each call.

    Args:
        steps: by graph. calls: graphs in the order in which forward calls them. levels: of a step that ran.
    """
    base = _estimated(steps, calls) if levels is None else _metered(levels)
    return Combination(chosen=tuple(chosen), peak_bytes=base.peak_bytes(chosen), seconds=sum(t.seconds for t in chosen))


def _metered(levels: StepLevels) -> Base:
    """Returns the levels of a step that ran without what its calls had."""
    forward, backward, between = [], [], [levels.between[0]]
    handed: list[int] = []
    held = result = 0
    for i, ran in enumerate(levels.chosen):
        forward.append(levels.forward[i] - ran.forward_peak_bytes - held)
        handed.append(max(result, ran.held_input_bytes))
        backward.append(levels.backward[i] - ran.backward_peak_bytes - held - sum(handed))
        held += ran.held_bytes
        result = ran.held_result_bytes
        between.append(levels.between[i + 1] - held)
    return Base(forward=tuple(forward), backward=tuple(backward), between=tuple(between), handed=tuple(handed))


def _estimated(steps: Mapping[str, JointStep], calls: Sequence[str]) -> Base:
    """Returns levels of results, which callers keep, and of gradients."""

    def returned(step: JointStep) -> int:
        """Returns the bytes of a call's results while later calls run: of a step's only call the caller lets go."""
        return sum(step.value_bytes[v] for v in step.results) if len(calls) > 1 else 0

    before = list(itertools.accumulate((returned(steps[name]) for name in calls), initial=0))[:-1]
    made = [sum(steps[name].value_bytes[v] for v in steps[name].gradients) for name in calls]
    behind = list(itertools.accumulate(reversed(made), initial=0))[-2::-1]
    backward = tuple(b + g for b, g in zip(before, behind, strict=True))
    return Base(forward=tuple(before), backward=backward, between=(0,) * (len(calls) + 1))


def combinations(
    steps: Mapping[str, JointStep],
    calls: Sequence[str],
    options: Mapping[str, Sequence[Timeline]],
    levels: StepLevels | None = None,
    *,
    divisible: Collection[str] = (),
) -> list[Combination]:
    """Returns combinations by falling peak and rising seconds.

    From all graphs at their fastest, one graph after another goes to a slower choice: the one that lowers the peak most
    for the seconds it takes, or, where none alone lowers the peak, the one that takes least. From these on, some calls
    in a row of a graph go to another choice.

    Args:
        divisible: graphs whose calls may get different choices, a few for each graph.
    """
    base = _estimated(steps, calls) if levels is None else _metered(levels)
    mixtures = Mixtures(base, calls, {name: sorted(options[name], key=lambda t: t.seconds) for name in options})
    found = [
        Combination(chosen=made, peak_bytes=base.peak_bytes(made), seconds=sum(t.seconds for t in made))
        for made in mixtures.found(frozenset(divisible))
    ]
    kept: list[Combination] = []
    for made in sorted(found, key=lambda c: (c.peak_bytes, c.seconds)):
        if not kept or made.seconds < kept[-1].seconds:
            kept.append(made)
    return kept[::-1]
