"""One budget over all graphs of a compiled step: which choice each graph gets.

Forward runs the calls of graphs in order, backward in reverse. A call's level is that of all calls before it: what
they hold, and what they return (the next one's input); in backward also the gradients of those after it. Where the
levels of a step that ran are known, those are taken, eager code between calls included, and changed by what a choice
holds more or less than that step's. Graphs that are equal are compiled once, so they share a choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from recoup.compiled.joint_step import JointStep
from recoup.compiled.schedule import Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A choice for each graph. `peak_bytes` is that of all calls, `seconds` what runs again."""

    chosen: Mapping[str, Timeline]
    peak_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLevels:
    """Bytes above those before the step, as they were metered while a step ran by `chosen`.

    Attributes:
        forward, backward: for each call, in forward's order, the highest one while its forward and its backward run.
        between: for n from 0 the highest level outside of calls while n of them hold what backward reads.
    """

    chosen: Mapping[str, Timeline]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    between: tuple[int, ...]


def combined(
    steps: Mapping[str, JointStep],
    calls: Sequence[str],
    chosen: Mapping[str, Timeline],
    levels: StepLevels | None = None,
) -> Combination:
    """Returns the peak and seconds of a choice for each graph.

    Args:
        steps: by graph. calls: graphs in the order in which forward calls them. levels: of a step that ran.
    """
    peak = _estimated(steps, calls, chosen) if levels is None else _shifted(calls, chosen, levels)
    return Combination(chosen=dict(chosen), peak_bytes=peak, seconds=sum(chosen[name].seconds for name in calls))


def _shifted(calls: Sequence[str], chosen: Mapping[str, Timeline], levels: StepLevels) -> int:
    """Returns the peak from the levels of a step that ran otherwise."""
    more, grown, handed, peak = 0, 0, 0, levels.between[0]
    result_now = result_then = 0
    for i, name in enumerate(calls):
        made, ran = chosen[name], levels.chosen[name]
        peak = max(peak, levels.forward[i] + more + grown + made.forward_peak_bytes - ran.forward_peak_bytes)
        # What a call hands to the next is held by either. By backward the caller let it go; forward it is there anyway,
        # or is let go if neither held it in the step that ran.
        change = max(result_now, made.held_input_bytes) - max(result_then, ran.held_input_bytes)
        handed, grown = handed + change, grown + max(0, change)
        behind = more + handed
        peak = max(peak, levels.backward[i] + behind + made.backward_peak_bytes - ran.backward_peak_bytes)
        more += made.held_bytes - ran.held_bytes
        result_now, result_then = made.held_result_bytes, ran.held_result_bytes
        peak = max(peak, levels.between[i + 1] + more + grown)
    return peak


def _estimated(steps: Mapping[str, JointStep], calls: Sequence[str], chosen: Mapping[str, Timeline]) -> int:
    before = peak = 0
    for name in calls:
        peak = max(peak, before + chosen[name].forward_peak_bytes)
        before += chosen[name].held_bytes + _returned(steps[name], len(calls))
    gradients = 0
    for name in reversed(calls):
        step, made = steps[name], chosen[name]
        before -= made.held_bytes + _returned(step, len(calls))
        peak = max(peak, before + made.backward_peak_bytes + gradients)
        gradients += sum(step.value_bytes[v] for v in step.gradients)
    return peak


def _returned(step: JointStep, num_calls: int) -> int:
    """Returns the bytes of a call's results while later calls run: of a step's only call the caller lets go."""
    return sum(step.value_bytes[v] for v in step.results) if num_calls > 1 else 0


def combinations(
    steps: Mapping[str, JointStep],
    calls: Sequence[str],
    options: Mapping[str, Sequence[Timeline]],
    levels: StepLevels | None = None,
) -> list[Combination]:
    """Returns combinations by falling peak and rising seconds.

    From all graphs at their fastest, one graph after another goes to a slower choice: the one that lowers the peak most
    for the seconds it takes, or, where none alone lowers the peak, the one that takes least.
    """
    options = {name: sorted(options[name], key=lambda t: t.seconds) for name in dict.fromkeys(calls)}
    at = dict.fromkeys(options, 0)

    def now() -> Combination:
        return combined(steps, calls, {name: options[name][i] for name, i in at.items()}, levels)

    found = [now()]
    while True:
        best: tuple[float, float, str, int] | None = None
        for name, i in at.items():
            for later in range(i + 1, len(options[name])):
                at[name] = later
                tried = now()
                at[name] = i
                gain, cost = found[-1].peak_bytes - tried.peak_bytes, tried.seconds - found[-1].seconds
                rank = (-gain / max(cost, 1e-12), cost) if gain > 0 else (0.0, cost)
                if best is None or (*rank, name, later) < best:
                    best = (*rank, name, later)
        if best is None:
            break
        *_, name, last = best
        while at[name] < last:  # what lies between saves less for its seconds, but may be all that a budget needs
            at[name] += 1
            found.append(now())
    kept: list[Combination] = []
    for made in sorted(found, key=lambda c: (c.peak_bytes, c.seconds)):
        if not kept or made.seconds < kept[-1].seconds:
            kept.append(made)
    return kept[::-1]
