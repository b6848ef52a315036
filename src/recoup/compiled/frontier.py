"""What a compiled step may hold: the choices worth compiling, by bytes and by seconds.

Forward is cut at narrow waists; segments and what each holds are chosen by `solver/segments.py`, for targets from the
least to all. Beside these, forward is cut as a whole: since rebuilds are late, what is held is often most of a peak.
Each choice is then run through `timeline`, whose peak is the one that counts. What is left are choices that no other
beats in peak, held bytes and seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from recoup.compiled.joint_step import JointStep
from recoup.compiled.schedule import Timeline, read_at_peak, rebuilt_for, run_again, timeline
from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.solver.held import Op, Segment, trade_offs
from recoup.solver.held_problem import HeldProblem
from recoup.solver.segments import Choice, SegmentSolver
from recoup.solver.waists import waists
from recoup.thresholds import ESTIMATE_SHARE, MOST_POINTS, MOST_TRIES, SAME_SHARE

_NUM_SQUEEZES = 400  # simulations that may lower the smallest peak, each of some milliseconds
_SQUEEZE_SHARES = (0.9, 0.97, 0.99)  # of its peak that a choice is brought below in one round; the next once none can
_MAX_POINTS = 60  # of a graph as a whole, by held bytes and seconds, for each price
_PRICES = (1.0, 1e-4)  # of ops without FLOPs, as parts of their seconds: all that has none runs again before a product


@dataclasses.dataclass(frozen=True, slots=True)
class Surroundings:
    """What a step has around a graph's calls.

    Attributes:
        num_calls: of the graph; each one's levels lie above what those before it hold. beside_bytes: the highest level
            of the rest of the step while all calls hold what they hold, that left out.
    """

    num_calls: int = 1
    beside_bytes: int = 0

    def peak_bytes(self, made: Timeline) -> int:
        """Returns the peak of a step whose calls make this choice."""
        held_bytes = made.held_bytes
        return max(made.peak_bytes + (self.num_calls - 1) * held_bytes, self.num_calls * held_bytes + self.beside_bytes)

    def excess(self, made: Timeline, target: float) -> float:
        """Returns by how much the step's levels are above a target, all together."""
        before = (self.num_calls - 1) * made.held_bytes - target
        between = self.num_calls * made.held_bytes + self.beside_bytes - target
        above = sum(level + before for level in (*made.forward_levels, *made.backward_levels) if level + before > 0)
        return above + max(0.0, between)


ALONE = Surroundings()


def choices(step: JointStep, surroundings: Surroundings = ALONE, *, enough_bytes: int = 0) -> list[Timeline]:
    """Returns timelines by falling peak; the first holds all that backward reads, or runs faster.

    Args:
        enough_bytes: a peak below which no choice is looked for.
    """
    found = _searched(step, surroundings, enough_bytes)
    if step.keeps_tangents and any(step.value_bytes[v] >= MIN_BLOCK_BYTES for v in step.tangents):
        # They hide from the search what else a change lowers: what is found without them is taken too.
        without = _searched(dataclasses.replace(step, keeps_tangents=False), surroundings, enough_bytes)
        found += [timeline(step, made.held, made.dropped) for made in without]
    return undominated(found)


def _searched(step: JointStep, surroundings: Surroundings, enough_bytes: int) -> list[Timeline]:
    """Returns the timelines of one search, those that no other beats, by falling peak."""
    everything = timeline(step, frozenset(step.reads))
    found = {(everything.held, everything.dropped): everything}
    if surroundings.peak_bytes(everything) <= enough_bytes:
        return [everything]
    for price in _PRICES:
        for held in trade_offs(_whole_forward(step, price), most=_MAX_POINTS):
            made = timeline(step, frozenset(held.values))
            found.setdefault((made.held, made.dropped), made)
    if any(surroundings.peak_bytes(t) <= enough_bytes and _is_little(step, t) for t in found.values()):
        return undominated(list(found.values()))
    most_bytes = max(t.peak_bytes for t in found.values())
    for made in _by_segments(step, surroundings, most_bytes, enough_bytes):
        found.setdefault((made.held, made.dropped), made)
    for dropped in _dropped_at_first(step):
        made = min(found.values(), key=surroundings.peak_bytes)
        made = made if dropped is None else timeline(step, made.held, dropped)
        squeezed = _squeezed(step, made, surroundings, drops=dropped != frozenset())
        while surroundings.peak_bytes(made) > enough_bytes and (lower := next(squeezed, None)) is not None:
            made = found.setdefault((lower.held, lower.dropped), lower)
    made = min(found.values(), key=lambda t: (_flops_again(step, t), surroundings.peak_bytes(t)))
    lowered = _lowered(step, made, surroundings)
    while surroundings.peak_bytes(made) > enough_bytes and (lower := next(lowered, None)) is not None:
        made = found.setdefault((lower.held, lower.dropped), lower)
    for made in _between(step, undominated(list(found.values()))):
        found.setdefault((made.held, made.dropped), made)
    for made in _eased(step, undominated(list(found.values())), surroundings, enough_bytes):
        found.setdefault((made.held, made.dropped), made)
    return undominated(list(found.values()))


def _by_segments(step: JointStep, surroundings: Surroundings, most_bytes: int, enough_bytes: int) -> Iterator[Timeline]:
    """Yields choices whose segments are chosen one by one, for targets from `most_bytes` to the least.

    If there is a peak that is enough and one of them reaches it: for targets that close in on that peak alone.
    """
    problem = held_problem(step)
    solver = SegmentSolver(problem)
    low, high, is_reached = enough_bytes // 2, most_bytes, False
    for _ in range(MOST_TRIES if enough_bytes else 0):
        choice = solver.solve(middle := (low + high) // 2)
        made = None if choice is None else timeline(step, _held_by(problem, choice))
        if made is not None:
            yield made
        if made is not None and surroundings.peak_bytes(made) > enough_bytes:
            high = middle
        else:
            low, is_reached = middle, is_reached or made is not None
    if is_reached or (least := solver.leanest()) is None:
        return
    low, high = least.peak_bytes, max(high, least.peak_bytes)
    most = MOST_TRIES if enough_bytes else MOST_POINTS
    for i in reversed(range(most)):
        choice = solver.solve(low + (high - low) * i // (most - 1))
        if choice is not None:
            yield (made := timeline(step, _held_by(problem, choice)))
            if surroundings.peak_bytes(made) <= enough_bytes:
                return


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


def _dropped_at_first(step: JointStep) -> list[frozenset[int] | None]:
    """Returns what is dropped where a search begins that squeezes the leanest choice; None: what that drops.

    From all of forward's values that can be dropped the lowest peaks are reached, from those that take no FLOPs others
    that run less again.
    """
    forward = frozenset(v for v in step.droppable if step.makers[v] < step.num_forward)
    cheap = frozenset(v for v in forward if not step.ops[step.makers[v]].flops)
    # A compiler that fuses kernels merges what is made anew for each reader: all of it is there at once.
    return [frozenset()] if step.fused_reads else [frozenset(), cheap, forward, None]


def _squeezed(step: JointStep, made: Timeline, surroundings: Surroundings, *, drops: bool) -> Iterator[Timeline]:
    """Yields choices of lower and lower peak: one value after the other is held no longer, held instead of rebuilt, or,
    if it `drops`, made for each op that needs it, one of backward's own as well.

    What is minimised is how far all levels together are above a target somewhat below the peak, so that equal layers,
    which peak alike, are lowered one by one. Values that are there at the highest level are tried first, others once
    none of these lowers it.
    """
    makers, tries, sizes = step.makers, _NUM_SQUEEZES, step.value_bytes
    own = frozenset(v for v in step.droppable if drops and makers[v] >= step.num_forward)

    def changed(value: int) -> Iterator[Timeline]:
        """Yields what may be done about a value."""
        alone = frozenset((value,))
        if value in made.held:
            held = made.held - alone
            yield timeline(step, held, made.dropped)
            if drops:
                yield timeline(step, held, made.dropped | rebuilt_for(step, value, held))
            return
        if value not in own:
            yield timeline(step, made.held | alone, made.dropped - alone)
        if drops and value in step.droppable:
            yield timeline(step, made.held, made.dropped ^ alone)

    for share in _SQUEEZE_SHARES:
        improved = True
        while improved and tries > 0:
            target = surroundings.peak_bytes(made) * share
            excess = surroundings.excess(made, target)
            values = {v for at in made.order if at < step.num_forward for v in step.ops[at].outputs} | own
            values |= {v for v in made.held if step.ops[makers[v]].can_rerun}
            there = read_at_peak(step, made) & values
            improved = False
            for some in (there, values - there):
                for value in sorted(some if not improved else (), key=lambda v: (-sizes[v], v)):
                    if tries <= 0 or sizes[value] < MIN_BLOCK_BYTES or surroundings.peak_bytes(made) <= target:
                        continue
                    for tried in changed(value):
                        tries -= 1
                        if (lower := surroundings.excess(tried, target)) < excess:
                            made, excess, improved = tried, lower, True
                            break
            if improved:
                yield made


def _lowered(step: JointStep, made: Timeline, surroundings: Surroundings) -> Iterator[Timeline]:
    """Yields choices of lower and lower levels, each by the one change that lowers them most for what it takes.

    Of the choices that run the fewest FLOPs again the leanest is where this begins: a product at a time.
    """
    tries = _NUM_SQUEEZES
    while tries > 0:
        target = surroundings.peak_bytes(made) * _SQUEEZE_SHARES[1]
        excess = surroundings.excess(made, target)
        best: tuple[tuple[float, int], Timeline] | None = None
        there = [v for v in read_at_peak(step, made) if step.makers[v] < step.num_forward]
        there = [v for v in there if step.value_bytes[v] >= MIN_BLOCK_BYTES and step.ops[step.makers[v]].can_rerun]
        tries -= len(there)
        # The least that it can take to hold one no longer, for all that it might lower: its own op.
        own = made.held - {v for at in run_again(step, made.order) for v in step.ops[at].outputs}
        least = {v: step.ops[step.makers[v]].seconds / excess if v in own else -math.inf for v in there}
        for value in sorted(there, key=lambda v: (least[v], v)):
            if best is not None and least[value] > best[0][0]:
                break
            alone = frozenset((value,))
            tried = timeline(step, made.held ^ alone, made.dropped - alone)
            fall, more = excess - surroundings.excess(tried, target), tried.seconds - made.seconds
            rank = (more / fall if more > 0 else -fall, value) if fall > 0 else None
            if rank is not None and (best is None or rank < best[0]):
                best = rank, tried
        if best is None:
            return
        made = best[1]
        yield made


def _is_little(step: JointStep, made: Timeline) -> bool:
    """Whether a choice runs no FLOPs again and hardly anything else: others are not worth looking for."""
    forward = sum(op.seconds for op in step.ops[: step.num_forward])
    return made.seconds <= SAME_SHARE * forward and not _flops_again(step, made)


def _flops_again(step: JointStep, made: Timeline) -> int:
    return sum(step.ops[at].flops for at in run_again(step, made.order))


def _eased(
    step: JointStep, curve: Sequence[Timeline], surroundings: Surroundings, enough_bytes: int
) -> Iterator[Timeline]:
    """Yields choices that run less again than those of a curve that make values anew for each op, and peak alike.

    From the leanest up: within each of some higher peaks the fastest known choice, or what was eased before, holds
    values, or rebuilds them once for all ops that need them, as long as there is room. If there is a peak that is
    enough: within that one alone.
    """
    by_peak = sorted(curve, key=surroundings.peak_bytes)
    low = surroundings.peak_bytes(by_peak[0])
    high = min((surroundings.peak_bytes(t) for t in by_peak if not t.dropped), default=low)
    made = by_peak[0]
    peaks = [low + (high - low) * i // MOST_TRIES for i in (range(MOST_TRIES + 1) if high > low else range(1))]
    for most in [max(low, enough_bytes)] if enough_bytes else peaks:
        known = [made, *(t for t in by_peak if surroundings.peak_bytes(t) <= most)]
        made = _faster(step, min(known, key=lambda t: t.seconds), surroundings, most)
        yield made


def _faster(step: JointStep, made: Timeline, surroundings: Surroundings, most_bytes: int) -> Timeline:
    """Returns a choice within a peak that runs less again, by what saves most: more held, or less dropped."""
    times = collections.Counter(run_again(step, made.order))
    again = {v for at in times for v in step.ops[at].outputs}

    def seconds(value: int) -> float:
        return step.ops[step.makers[value]].seconds * times[step.makers[value]]

    for value in sorted(again, key=lambda v: (-seconds(v), v))[:MOST_POINTS]:
        alone = frozenset((value,))
        ways = [(made.held | alone, made.dropped - alone)] if step.makers[value] < step.num_forward else []
        for held, dropped in (*ways, (made.held, made.dropped - alone)):
            if (held, dropped) == (made.held, made.dropped):
                continue
            tried = timeline(step, held, dropped)
            if tried.seconds < made.seconds and surroundings.peak_bytes(tried) <= most_bytes:
                made = tried
                break
    return made


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
            yield timeline(step, low.held | frozenset(part), low.dropped)
            yield timeline(step, low.held | frozenset(more) - frozenset(part), low.dropped)


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
    full = timeline(dataclasses.replace(step, fused_reads=0), frozenset(reads))
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
