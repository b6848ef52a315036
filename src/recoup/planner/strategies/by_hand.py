"""By hand: the plans that people make, so that none of them is left on the table."""

from __future__ import annotations

from typing import ClassVar, Self

from recoup.ir.decision import Ambient, Offload, Recompute
from recoup.planner.incumbents import SEARCH_OPS, Allowance, Candidate, Incumbents
from recoup.planner.simulator import EVERYWHERE
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Proposals, Strategy
from recoup.planner.strategies.offload import with_inputs_offloaded
from recoup.planner.strategies.tile import with_tiles
from recoup.solver.baselines import choice_of
from recoup.solver.offload import FEWEST_LAYERS
from recoup.solver.sequence import region_of
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES, SAME_SHARE


class ByHandStrategy(Strategy):
    """Every block, every second block, segments of sqrt(n) blocks; and all calls of a kind that repeats."""

    actions: ClassVar[tuple[str, ...]] = ("recompute",)

    def __init__(self, step: PlannedStep) -> None:
        self._step = step

    @classmethod
    def make(cls, step: PlannedStep) -> Self:
        """Returns the strategy."""
        return cls(step)

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the baselines that may be as fast as what was found, until one fits."""
        if "recompute" not in self._step.actions or self._step.is_content(incumbents, budget_bytes):
            return
        if self._step.is_settled_by_tensor(incumbents, budget_bytes):
            return
        view = self._step.views_for(budget_bytes, incumbents).saving
        allowed = incumbents.seconds(budget_bytes) * (1 + SAME_SHARE) - incumbents.plain.step_seconds
        hopeful = [
            (sum(region_of(tuple(s)).flops for s in segments), extra_seconds, segments)
            for extra_seconds, peak_bytes, segments in view.solver.baselines
            if extra_seconds <= allowed and peak_bytes + view.fixed_bytes <= budget_bytes * (1 + ESTIMATE_SHARE)
        ]
        hopeful.sort(key=lambda b: b[:2])
        for _, _, segments in hopeful[:MOST_TRIES]:
            candidate = yield view.decide(choice_of(view.solver.line, segments))
            if candidate.peak_bytes <= budget_bytes:
                return

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields everything that `whole_kinds` does."""
        yield from whole_kinds(self._step, incumbents, self._step.simulator.base[0])


def whole_kinds(step: PlannedStep, incumbents: Incumbents, tiles: Decisions = ()) -> Proposals:
    """Yields what people would try: every call of a kind that repeats, with and without rederive around it.

    Kinds that save the most come first; one far above the smallest peak known ends it.

    Args:
        tiles: added to all of it.
    """
    allowance = Allowance(num_ops=SEARCH_OPS, began_at=incumbents.num_simulated_ops)
    scans = () if step.scans is None else step.scans.least()
    ambients: list[Decisions] = [()]
    if "rederive" in step.actions:
        yield with_tiles((*EVERYWHERE, *scans), tiles)
        ambients.append(EVERYWHERE)
    if "recompute" not in step.actions:
        return
    for paths in _repeated_kinds(step):
        if allowance.is_spent(incumbents):
            return
        found: list[Candidate] = []
        for ambient in ambients:
            inside: Ambient = "rederive" if ambient else "save"
            regions = ambient + tuple(Recompute(path=p, inside=inside) for p in paths)
            found.append((yield with_tiles((*regions, *scans), tiles)))
            if step.simulator.link is not None:
                offloaded = (*ambient, *(Offload(path=p, inside=inside) for p in paths))
                for decisions in (with_inputs_offloaded(regions), offloaded):
                    found.append((yield with_tiles((*decisions, *scans), tiles)))
        if min(c.peak_bytes for c in found) > incumbents.least().peak_bytes * (1 + ESTIMATE_SHARE):
            return


def _repeated_kinds(step: PlannedStep) -> list[list[str]]:
    """Returns the paths of the calls of each kind that repeats, those that save the most first."""
    trace = step.calls_trace
    kinds: dict[str, list[int]] = {}
    for index, call in enumerate(trace.calls):
        if call.path and not call.refusal and not call.runs_once and call.replay_stop_op >= 0 and call.children:
            kinds.setdefault(call.kind, []).append(index)
    saved = dict.fromkeys(kinds, 0)
    saved_at = [0] * (len(trace.ops) + 1)
    for storage in trace.storages:
        if storage.category == "saved":
            saved_at[storage.saved_op] += storage.nbytes
    for kind, members in kinds.items():
        inside = {op for i in members for op in range(trace.calls[i].first_op, trace.calls[i].last_op)}
        saved[kind] = sum(saved_at[op] for op in inside)
    repeated = sorted((k for k in kinds if len(kinds[k]) >= FEWEST_LAYERS), key=lambda k: -saved[k])
    return [list(dict.fromkeys(trace.calls[i].path for i in kinds[kind])) for kind in repeated]
