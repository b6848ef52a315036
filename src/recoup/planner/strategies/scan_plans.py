"""Plans for scans inside of a model: in how many bytes each of them runs, so that the step fits in the least time.

A scan whose caller gave it no schedule is found by capturing the step with all its steps taped. The solver chooses
between its bytes and everything else by what `solver/scans.py` adds to its prices; the simulated applied plan decides,
and the bytes are then moved by what it is over the budget or under it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from recoup import progress
from recoup.capture.tracker import Tracker
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Ambient, Decision
from recoup.planner.incumbents import Candidate
from recoup.planner.simulator import EVERYWHERE, Simulator
from recoup.planner.strategies.base import Proposals
from recoup.recurrent.schedule_costs import evaluations_by_bytes
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.scan_bytes import StepOfScan
from recoup.solver.scans import Ladder, Rung, chosen_bytes, fold, merged, split_scans, with_scans
from recoup.solver.sequence import Choice
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES, SAME_SHARE


@dataclasses.dataclass(slots=True, kw_only=True)
class FoundScan:
    """A scan of the captured step.

    Attributes:
        owner: the call whose own forward runs it, as an index into the trace's calls.
        first_op, last_op: its first forward is ops [first_op, last_op).
        step: what a step takes; None while that is not known.
    """

    owner: int
    is_free: bool
    first_op: int
    last_op: int = -1
    step: StepOfScan | None = None


class ScanFinder:
    """Notes the scans of a step that is captured; a `Watcher`."""

    def __init__(self) -> None:
        self.found: list[FoundScan] = []
        self._tracker: Tracker | None = None

    def begun(self, *, is_free: bool) -> None:
        """Notes where a scan begins."""
        tracker = execution_context.observer()
        assert isinstance(tracker, Tracker), "scans are watched while a step is captured"
        if tracker is not self._tracker:  # a capture that was given up is not counted
            self._tracker, self.found = tracker, []
        self.found.append(FoundScan(owner=tracker.call, is_free=is_free, first_op=len(tracker.ops)))

    def measured(self, found: StepOfScan) -> None:
        """Notes the bytes and seconds of one step."""
        self.found[-1].step = found

    def ended(self) -> None:
        """Notes where the scan's first forward ends."""
        tracker = execution_context.observer()
        assert isinstance(tracker, Tracker), "scans are watched while a step is captured"
        self.found[-1].last_op = len(tracker.ops)


class ScanPlans:
    """A step's scans, and candidates that differ in their bytes.

    Attributes:
        trace: of the step with all steps of all scans taped, each scan folded into the call that runs it.
        taped: the decisions that do so.
        ladders: the solver's, one for each scan.
        names: the actions that the ladders add to the solver's.
        rederives: whether the steps' tapes are smaller where they rederive.
    """

    def __init__(self, simulator: Simulator, *, rederives: bool) -> None:
        self._simulator = simulator
        self._plain, found = self._watched(())
        self.trace = self._plain.trace
        self.rederives = False
        derived: list[StepOfScan | None] = []
        self._derived: PricedTrace | None = None
        if rederives:
            self._derived, others = self._watched(EVERYWHERE)
            derived = [scan.step for scan in others]
        same = len(derived) == len(found)
        for scan, step in zip(found, derived if same else [None] * len(found), strict=True):
            if scan.step is not None and step is not None and step.taped_bytes < scan.step.taped_bytes:
                self.rederives = True
        leaves: dict[tuple[int, int], list[int]] = {}
        for n, scan in enumerate(found):
            if scan.is_free and scan.step is not None:
                leaves.setdefault((scan.owner, self._leaf_of(scan.first_op)), []).append(n)
        self.ladders = tuple(
            self._ladder(found, members, derived if same else []) for (_, _), members in leaves.items()
        )
        self.taped = self._decisions([b for ladder in self.ladders for b in ladder.taped_bytes])
        # From all steps taped down: what each scan may take, the cheapest steps down first.
        every = merged(_of_each(self.ladders)) if self.ladders else ()
        self._path = [tuple(b for ladder in self.ladders for b in ladder.needed_bytes), *(r.scan_bytes for r in every)]
        self._seconds_on_path = [0.0, *(rung.seconds for rung in every)]

    def _leaf_of(self, op: int) -> int:
        """Returns the solver leaf that an op lies in: scans in one leaf are chosen together."""
        return sum(c.first_op <= op and c.last_op > c.first_op for c in self.trace.calls) + sum(
            c.last_op <= op and c.last_op > c.first_op for c in self.trace.calls
        )

    def _watched(self, chosen: tuple[Decision, ...]) -> tuple[PricedTrace, list[FoundScan]]:
        """Returns the step with `chosen` applied and all scans' steps taped, folded, and the scans."""
        progress.advance("capturing the step with all steps of its scans taped")
        finder = ScanFinder()
        with scan_bytes.watching(finder):
            priced = self._simulator.simulate_priced(chosen)
        ranges = [(scan.first_op, scan.last_op) for scan in finder.found]
        return dataclasses.replace(priced, trace=fold(priced.trace, ranges)), finder.found

    def taped_step(self, chosen: tuple[Decision, ...]) -> PricedTrace:
        """Returns the step with `chosen` applied and all steps of its scans taped, and notes what it costs."""
        if not chosen:
            priced = self._plain
        elif chosen == EVERYWHERE and self._derived is not None:
            priced = self._derived
        else:
            priced, _ = self._watched(chosen)
        decisions = with_scans(chosen, self.taped)
        if decisions not in self._simulator.simulated:
            self._simulator.note(decisions, priced)
        return priced

    def _ladder(self, found: list[FoundScan], members: list[int], derived: list[StepOfScan | None]) -> Ladder:
        scans = [found[n] for n in members]
        owner = self.trace.calls[scans[0].owner]
        seconds = [self._seconds(scan) for scan in scans]
        steps = [scan.step for scan in scans if scan.step is not None]
        variants: dict[Ambient, list[StepOfScan]] = {
            "save": steps,
            "rederive": [step for n, step in enumerate(derived) if n in members and step],
        }
        return Ladder(
            path=owner.path,
            call=owner.index,
            scans=tuple(sum(other.owner >= found[n].owner for other in found[:n]) for n in members),
            first_ops=tuple(scan.first_op for scan in scans),
            taped_bytes=tuple(_taped_bytes(step) for step in steps),
            needed_bytes=tuple(_needed_bytes(step) for step in steps),
            rungs={
                action: merged(_rungs(step, cost) for step, cost in zip(known, seconds, strict=True))
                for action, known in variants.items()
                if len(known) == len(scans)
            },
        )

    def _seconds(self, scan: FoundScan) -> float:
        """Returns the seconds of one more evaluation of a step."""
        assert scan.step is not None
        return sum(self._plain.op_seconds[scan.first_op : scan.last_op]) / scan.step.num_steps

    # -- candidates ---------------------------------------------------------------------------------------------

    def _decisions(self, scan_bytes: Sequence[int]) -> tuple[Decision, ...]:
        """Returns the decisions that give each scan its bytes."""
        left = iter(scan_bytes)
        calls = self._simulator.num_calls
        found = [d for ladder in self.ladders for d in ladder.decisions([next(left) for _ in ladder.scans])]
        return tuple(dataclasses.replace(d, call=None) if calls.get(d.path, 1) == 1 else d for d in found)

    def decide(self, choice: Choice) -> tuple[Decision, ...]:
        """Returns the decisions about scans that a solver's choice makes."""
        return self._decisions([b for each in chosen_bytes(choice, self.ladders) for b in each])

    def least(self) -> tuple[Decision, ...]:
        """Returns the decisions with which scans take the fewest bytes."""
        return self._decisions(self._path[-1])

    def moved(self, candidate: Candidate, budget_bytes: int) -> Proposals:
        """Yields plans that differ in their scans' bytes only, until one takes just less than the budget.

        The peak follows the bytes about one to one where a scan is part of it; each try moves them by what is missing,
        at the slope of those before.
        """
        top, floor = sum(self._path[0]), sum(self._path[-1])
        tried: list[tuple[int, int]] = []  # (bytes of scans, peak)
        at = self._bytes(candidate)
        for _ in range(MOST_TRIES):
            tried.append((at, candidate.peak_bytes))
            fits = [a for a, peak in tried if peak <= budget_bytes]
            over = [a for a, peak in tried if peak > budget_bytes]
            is_close = (1 - SAME_SHARE) * budget_bytes <= candidate.peak_bytes <= budget_bytes
            if is_close or top in fits or floor in over:
                return
            gap = budget_bytes * (1 - SAME_SHARE / 2) - candidate.peak_bytes
            wanted = at + int(gap / _slope(tried))
            if fits and over and not max(fits) < wanted < min(over):
                if min(over) - max(fits) <= SAME_SHARE * budget_bytes:
                    return
                wanted = (max(fits) + min(over)) // 2
            if wanted < floor - ESTIMATE_SHARE * budget_bytes:
                return
            at = min(max(wanted, floor), top)
            candidate = yield with_scans(candidate.decisions, self._between(at))

    def seconds_at(self, candidate: Candidate, budget_bytes: int) -> float:
        """Returns about how long a candidate's step takes when its scans' bytes are moved to the budget."""
        at = self._bytes(candidate)
        wanted = at + budget_bytes - candidate.peak_bytes
        if wanted < sum(self._path[-1]) - ESTIMATE_SHARE * budget_bytes:
            return float("inf")
        return candidate.step_seconds + self._extra_seconds(wanted) - self._extra_seconds(at)

    def _bytes(self, candidate: Candidate) -> int:
        """Returns the bytes that a candidate's scans may take together."""
        return min(sum(d.budget_bytes for d in split_scans(candidate.decisions)[0]), sum(self._path[0]))

    def _extra_seconds(self, total_bytes: int) -> float:
        """Returns the seconds of what runs again when scans take so many bytes together, by the rungs."""
        totals = [sum(step) for step in reversed(self._path)]
        return float(np.interp(total_bytes, totals, list(reversed(self._seconds_on_path))))

    def _between(self, total_bytes: int) -> tuple[Decision, ...]:
        """Returns the decisions on the path from all steps taped down at which scans take so many bytes together."""
        if total_bytes >= sum(self._path[0]):
            return self.taped
        for above, below in itertools.pairwise(self._path):
            if sum(below) <= total_bytes:
                share = (total_bytes - sum(below)) / max(sum(above) - sum(below), 1)
                return self._decisions([b + int(share * (a - b)) for a, b in zip(above, below, strict=True)])
        return self.least()


def _slope(tried: Sequence[tuple[int, int]]) -> float:
    """Returns the change of the peak for a byte of a scan, from the last two tries; 1 if they show no growth."""
    if len(tried) < 2:
        return 1.0
    (a, a_peak), (b, b_peak) = tried[-2:]
    return (b_peak - a_peak) / (b - a) if (b_peak - a_peak) * (b - a) > 0 else 1.0


def _needed_bytes(step: StepOfScan) -> int:
    return step.taped_bytes + step.working_bytes


def _taped_bytes(step: StepOfScan) -> int:
    """Returns the bytes in which a scan tapes all its steps and lets them share graphs."""
    return _needed_bytes(step) + step.shared_bytes


def _rungs(step: StepOfScan, seconds: float) -> tuple[Rung, ...]:
    """Returns the ways to run one scan, all steps taped first.

    Args:
        seconds: of an evaluation of one step.
    """
    found = evaluations_by_bytes(
        step.num_steps, state_bytes=step.state_bytes, tape_bytes=step.tape_bytes, in_row_bytes=step.in_row_bytes
    )
    return tuple(
        Rung(
            scan_bytes=(held + step.working_bytes,),
            freed_bytes=step.taped_bytes - held,
            seconds=(evaluations - step.num_steps) * seconds,
        )
        for held, evaluations in found
    )


def _of_each(ladders: Sequence[Ladder]) -> Iterator[Sequence[Rung]]:
    """Yields each ladder's rungs, beginning with all steps taped."""
    for ladder in ladders:
        first = Rung(scan_bytes=ladder.needed_bytes, freed_bytes=0, seconds=0.0)
        yield (first, *ladder.rungs["save"])
