"""What a compiled step holds, the order its backward runs in, and the bytes that are there at every op.

Holding a set of forward's values, backward runs its own ops in their order, and every forward op that one of them needs
runs again right before it, once: the rebuild of a value is as late as it can be, so what lies between two held values
is there only while backward is between them. A value that is dropped is made anew for each of backward's own ops that
needs it; one of backward's own making may be dropped as well, and so comes late, or runs again.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence

from recoup.compiled.joint_step import JointStep
from recoup.compiled.liveness import forward_levels, levels_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step that holds certain values.

    Attributes:
        held: the values, with those that backward needs and cannot rebuild. dropped: values that each of backward's own
            ops that needs them makes anew. order: of all that runs in backward, ops that run again as often as they do.
        forward_peak_bytes, backward_peak_bytes: above what was there before the step.
        held_bytes: at the end of forward, results left out. held_result_bytes: of results that are held too, there when
            the caller has let go of them. held_input_bytes: of activations that backward reads, likewise.
        forward_levels, backward_levels: bytes while each op runs.
        seconds: of the ops that run again.
    """

    held: frozenset[int]
    dropped: frozenset[int]
    order: tuple[int, ...]
    forward_levels: tuple[int, ...]
    backward_levels: tuple[int, ...]
    held_bytes: int
    seconds: float
    held_result_bytes: int = 0
    held_input_bytes: int = 0

    @functools.cached_property
    def forward_peak_bytes(self) -> int:
        """The highest level of forward."""
        return max(self.forward_levels, default=0)

    @functools.cached_property
    def backward_peak_bytes(self) -> int:
        """The highest level of backward."""
        return max(self.backward_levels, default=0)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """The highest level."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


def timeline_key(made: Timeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns what a choice is told by, in one order."""
    return tuple(sorted(made.held)), tuple(sorted(made.dropped))


def backward_order(
    step: JointStep, held: frozenset[int], dropped: frozenset[int] = frozenset()
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Returns what has to be held, and the ops of backward in order with those of forward that run again.

    Args:
        held: what is to be held; values that are needed and cannot be rebuilt are added. dropped: values that each of
            backward's own ops makes anew.
    """
    maker, ops, order, all_held = step.makers, step.ops, list[int](), set(held)
    inputs, outputs = step.inputs, step.outputs
    ready = {*step.given, *held}
    dropping = {maker[v] for v in dropped}

    def needed(at: int) -> list[int]:
        """The ops that have to run before op `at`, and it, in order."""
        found, left = {at}, list(inputs[at])
        while left:
            value = left.pop()
            if value in ready or (made_by := maker[value]) in found:
                continue
            if made_by < step.num_forward and not ops[made_by].can_rerun:
                all_held.add(value)
                ready.add(value)
                continue
            found.add(made_by)
            left += inputs[made_by]
        return _early(step, sorted(found), dropped)

    for at in step.lean_order:
        if at in dropping:
            continue
        if ready.issuperset(inputs[at]):
            order.append(at)
        else:
            run = needed(at)
            for again in run:
                ready.update(outputs[again])
            order += run
            ready -= dropped
        ready.update(outputs[at])
    rerun = {at for at in order if at < step.num_forward}
    # A value that is held and made again all the same (an op with several results) is not held.
    read = step.gradients.union(*[inputs[at] for at in order])
    kept = {v for v in all_held if v in read and maker.get(v, len(step.ops)) < step.num_forward}
    return frozenset(v for v in kept if maker[v] not in rerun or v in held), tuple(order)


def _early(step: JointStep, run: list[int], dropped: frozenset[int]) -> list[int]:
    """Returns ops that lead to one, given in the graph's order; what lets go of more than it makes comes early.

    Args:
        dropped: values that are not there afterwards.
    """
    shrinking = step.shrinking
    for at in [n for n in run if n in shrinking]:
        place = {n: i for i, n in enumerate(run)}
        after, freed = 0, 0
        for value in shrinking[at]:
            if (made_by := step.makers[value]) not in place:
                continue
            others = [n for n in run if value in step.inputs[n] and n != at]
            after = max([after, place[made_by], *(place[n] for n in others)])
            freed += step.value_bytes[value] if value in dropped else 0
        if freed > sum(step.value_bytes[v] for v in step.ops[at].outputs) and after < place[at] - 1:
            run.insert(after + 1, run.pop(place[at]))
    return run


def timeline(
    step: JointStep,
    held: frozenset[int],
    dropped: frozenset[int] = frozenset(),
    *,
    given: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Timeline:
    """Returns the order and the bytes of a step that holds `held` from forward to backward.

    Args:
        dropped: values that each of backward's own ops makes anew. given: the ops of forward and of backward as torch
            divides the graph, where nothing is written over what is read.
    """
    dropped = frozenset(v for value in dropped for v in step.ops[step.makers[value]].outputs) - held
    all_held, order = backward_order(step, held, dropped) if given is None else (held, given[1])
    # What nothing reads any more and no one keeps does not run.
    keeps = step.results | all_held
    if given is None:
        before = forward_levels(step, keeps)
    else:
        before = levels_of(step, given[0], start=(), keeps=keeps, overwrites=False)
    again = run_again(step, order)
    kept = {at: step.ops[at].state_bytes for at in again if step.ops[at].state_bytes}  # from its run to the one again
    held_bytes = sum(kept.values()) + sum(step.value_bytes[v] for v in all_held if v not in step.results)
    start = tuple(sorted(all_held | step.tangents))
    stays = step.gradients | step.tangents if step.keeps_tangents else step.gradients
    behind = levels_of(step, order, start=start, keeps=stays, overwrites=given is None)
    if kept:
        ran = range(step.num_forward) if given is None else given[0]
        place = {at: i for i, at in enumerate(ran)}
        before = _shifted(before, [(place[at], nbytes) for at, nbytes in kept.items()])
        places = [(i, kept[at]) for i, at in enumerate(order) if at in kept]
        behind = _shifted(behind, [(0, sum(kept.values())), *((i + 1, -nbytes) for i, nbytes in places)])
        for i, nbytes in places:  # the state that such an op finds and puts back
            behind[i] += nbytes
    reads = set[int]().union(*[step.ops[at].inputs for at in order])
    return Timeline(
        held=all_held,
        dropped=dropped,
        order=order,
        forward_levels=tuple(before),
        backward_levels=tuple(behind),
        held_bytes=held_bytes,
        held_result_bytes=sum(step.value_bytes[v] for v in all_held & step.results),
        held_input_bytes=sum(step.value_bytes[v] for v in step.activations & reads),
        seconds=sum(step.ops[at].seconds for at in again),
    )


def _shifted(levels: list[int], changes: Sequence[tuple[int, int]]) -> list[int]:
    """Returns levels with bytes more from some positions on."""
    more = [0] * (len(levels) + 1)
    for position, nbytes in changes:
        more[position] += nbytes
    return list(map(operator.add, levels, itertools.accumulate(more)))


def run_again(step: JointStep, order: Sequence[int]) -> list[int]:
    """Returns the ops of backward's order that have run before, in forward or in backward, as often as they do."""
    if len(set(order)) == len(order):
        return [at for at in order if at < step.num_forward]
    ran, found = set(range(step.num_forward)), []
    for at in order:
        if at in ran:
            found.append(at)
        ran.add(at)
    return found


def rebuilt_for(step: JointStep, value: int, held: frozenset[int]) -> frozenset[int]:
    """Returns the values that are made on the way to one, it included, where `held` are there."""
    found: set[int] = set()
    left = [value]
    while left:
        at = left.pop()
        if at in found or at in held or at not in step.makers:
            continue
        op = step.ops[step.makers[at]]
        if op.can_rerun and not op.is_random:
            found.update(op.outputs)
            left += op.inputs
    return frozenset(found) - held


def read_at_peak(step: JointStep, made: Timeline) -> set[int]:
    """Returns the ops' values that are there while backward's level is the highest, for ops that run then or later."""
    order, levels = made.order, made.backward_levels
    if not levels:
        return set(made.held)
    peak = levels.index(max(levels))
    here = set(made.held)
    for at in order[: peak + 1]:
        here.update(step.ops[at].outputs)
    read: set[int] = set()
    for at in order[peak:]:
        read.update(step.ops[at].inputs)
    return here & read
