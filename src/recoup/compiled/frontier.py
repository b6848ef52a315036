"""What a compiled step may hold: the choices worth compiling, by bytes and by seconds.

Forward is cut at narrow waists; segments and what each holds are chosen by `solver/segments.py`, for targets from the
least to all. Beside these, forward is cut as a whole: since rebuilds are late, what is held is often most of a peak.
Each choice is then run through `timeline`, whose peak is the one that counts. What is left are choices that no other
beats in peak, held bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from recoup.compiled.schedule import JointStep, Timeline, timeline
from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.solver.held import Op, Segment, trade_offs
from recoup.solver.segment_labels import HeldProblem
from recoup.solver.segments import Choice, SegmentSolver
from recoup.solver.waists import waists
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES

_NUM_PLANS = 24  # targets between the least peak and all held: the next finer one changes a few percent
_NUM_SQUEEZES = 400  # simulations that may lower the smallest peak, each of some milliseconds
_SQUEEZE_SHARES = (0.9, 0.97, 0.99)  # of its peak that a choice is brought below in one round; the next once none can
_MAX_POINTS = 60  # of a graph as a whole, by held bytes and seconds, for each price
_PRICES = (1.0, 1e-4)  # of ops without FLOPs, as parts of their seconds: all that has none runs again before a product


def choices(step: JointStep, *, num_targets: int = _NUM_PLANS) -> list[Timeline]:
    """Returns timelines by falling peak; the first holds all that backward reads, or runs faster."""
    problem = held_problem(step)
    solver = SegmentSolver(problem)
    found = {t.held: t for t in [timeline(step, frozenset(step.reads))]}
    for price in _PRICES:
        for held in trade_offs(_whole_forward(step, price), most=_MAX_POINTS):
            made = timeline(step, frozenset(held.values))
            found.setdefault(made.held, made)
    least = solver.leanest()
    if least is not None:
        most_bytes = max(t.peak_bytes for t in found.values())
        low, high = least.peak_bytes, max(most_bytes, least.peak_bytes)
        for i in range(num_targets):
            target = low + (high - low) * i // max(1, num_targets - 1)
            choice = solver.solve(target)
            if choice is not None:
                made = timeline(step, _held_by(problem, choice))
                found.setdefault(made.held, made)
        for made in _squeezed(step, min(found.values(), key=lambda t: t.peak_bytes)):
            found.setdefault(made.held, made)
        for made in list(_between(step, undominated(list(found.values())))):
            found.setdefault(made.held, made)
    return undominated(list(found.values()))


def _whole_forward(step: JointStep, price: float) -> Segment:
    """Returns a graph as one segment: held bytes are most of its peak where rebuilds are short, and all that counts
    while other graphs' calls are between its own two.

    Args:
        price: of ops without FLOPs, a part of their seconds.
    """
    return Segment(
        value_bytes=step.value_bytes,
        ops=tuple(
            Op(
                inputs=op.inputs,
                outputs=op.outputs,
                seconds=op.seconds if op.flops else op.seconds * price,
                can_rerun=op.can_rerun,
            )
            for op in step.ops[: step.num_forward]
        ),
        reads=frozenset(step.reads),
    )


def _squeezed(step: JointStep, made: Timeline) -> Iterator[Timeline]:
    """Yields choices of lower and lower peak: one value after the other is held no longer, or held instead of rebuilt.

    What is minimised is how far all levels together are above a target somewhat below the peak, so that equal layers,
    which peak alike, are lowered one by one.
    """
    maker, tries = step.makers, _NUM_SQUEEZES
    for share in _SQUEEZE_SHARES:
        improved = True
        while improved:
            target = made.peak_bytes * share
            excess = _excess(made, target)
            rebuilt = {v for at in made.order if at < step.num_forward for v in step.ops[at].outputs}
            able = [v for v in made.held if step.ops[maker[v]].can_rerun] + [v for v in rebuilt if v not in made.held]
            improved = False
            for value in sorted(able, key=lambda v: (-step.value_bytes[v], v)):
                if not tries or step.value_bytes[value] < MIN_BLOCK_BYTES:
                    break
                tries -= 1
                tried = timeline(step, made.held ^ {value})
                lower = _excess(tried, target)
                if lower < excess:
                    made, excess, improved = tried, lower, True
                    if tried.peak_bytes <= target:
                        break
            if improved:
                yield made


def _excess(made: Timeline, target: float) -> float:
    return sum(level - target for level in (*made.forward_levels, *made.backward_levels) if level > target)


def _between(step: JointStep, curve: Sequence[Timeline]) -> Iterator[Timeline]:
    """Yields choices between those of a curve that are far from each other: of what one holds more, a part."""
    for high, low in itertools.pairwise(curve):
        if low.peak_bytes > high.peak_bytes * (1 - ESTIMATE_SHARE):
            continue
        more = sorted(high.held - low.held, key=lambda v: (step.makers[v], v))
        if not more:
            continue
        for i in range(1, MOST_TRIES):
            part = more[: len(more) * i // MOST_TRIES]
            yield timeline(step, low.held | frozenset(part))
            yield timeline(step, low.held | frozenset(more) - frozenset(part))


def undominated(timelines: list[Timeline]) -> list[Timeline]:
    """Returns those that no other beats in peak, held bytes and seconds, by falling peak."""
    kept: list[Timeline] = []
    for made in sorted(timelines, key=lambda t: (t.peak_bytes, t.seconds, t.held_bytes)):
        if not any(k.seconds <= made.seconds and k.held_bytes <= made.held_bytes for k in kept):
            kept.append(made)
    return kept[::-1]


def _held_by(problem: HeldProblem, choice: Choice) -> frozenset[int]:
    """Returns the values that a choice holds."""
    held: set[int] = set()
    ends = [first for first, _ in choice.segments[1:]] + [len(problem.ops)]
    for (first, label), end in zip(choice.segments, ends, strict=True):
        if label.held is not None:
            held.update(label.held)
        else:
            held.update(v for saved in problem.saves[first:end] for v in saved)
    return frozenset(held)


def held_problem(step: JointStep) -> HeldProblem:
    """Returns a joint graph as the solver of segments sees it."""
    maker = {v: i for i, op in enumerate(step.ops[: step.num_forward]) for v in op.outputs}
    ops = tuple(
        Op(inputs=op.inputs, outputs=op.outputs, seconds=op.seconds, can_rerun=op.can_rerun)
        for op in step.ops[: step.num_forward]
    )
    sizes = [b if b >= MIN_BLOCK_BYTES else 0 for b in step.value_bytes]
    places = [0, *waists(ops, [b or 1 for b in step.value_bytes], sorted(step.results & maker.keys()))]
    reads = step.reads
    reached = _reached(step, reads, maker)
    saves: list[list[int]] = [[] for _ in ops]
    for value, at in reads.items():
        # Backward is still behind this op when it first reads the value: it is needed as early as that op's own.
        saves[reached[min(at, len(step.ops) - 1) - step.num_forward] if reached else maker[value]].append(value)
    full = timeline(dataclasses.replace(step, fuses=False), frozenset(reads))
    ends = [*places[1:], len(ops)]
    saved = [sum(sizes[v] for i in range(a, b) for v in saves[i]) for a, b in zip(places, ends, strict=True)]
    forward, backward, gradients = [], [], []
    emitted, before, behind = _emitted(step), 0, len(step.ops) - step.num_forward
    grad_at: list[int] = []
    total = 0
    for at in range(step.num_forward, len(step.ops)):
        total += emitted.get(at, 0)
        grad_at.append(total)
    positions = {at: i for i, at in enumerate(full.order)}
    for k, (first, end) in enumerate(zip(places, ends, strict=True)):
        forward.append(max(0, max(full.forward_levels[first:end]) - before))
        own = [i for i in range(behind) if first <= reached[i] < end]
        levels = [full.backward_levels[positions[step.num_forward + i]] for i in own]
        gradient = max((grad_at[i] for i in own), default=0)
        gradients.append(gradient)
        backward.append(max(0, max(levels, default=0) - before - gradient))
        before += saved[k]
    return HeldProblem(
        ops=ops,
        value_bytes=tuple(sizes),
        saves=tuple(map(tuple, saves)),
        places=tuple(places),
        saved_bytes=tuple(saved),
        forward_bytes=tuple(forward),
        backward_bytes=tuple(backward),
        gradient_bytes=tuple(gradients),
        fixed_bytes=0,
    )


def _reached(step: JointStep, reads: dict[int, int], maker: dict[int, int]) -> list[int]:
    """Returns for each op of backward the last op of forward whose results it, or one after it, still reads."""
    found = [0] * (len(step.ops) - step.num_forward)
    last = 0
    for at in range(len(step.ops) - 1, step.num_forward - 1, -1):
        last = max([last, *(maker[v] for v in step.ops[at].inputs if v in reads)])
        found[at - step.num_forward] = last
    return found


def _emitted(step: JointStep) -> dict[int, int]:
    """Returns the bytes of gradients that each op of backward makes."""
    found: dict[int, int] = {}
    for at in range(step.num_forward, len(step.ops)):
        nbytes = sum(step.value_bytes[v] for v in step.ops[at].outputs if v in step.gradients)
        if nbytes:
            found[at] = nbytes
    return found
