"""Offload: regions' inputs, and what calls save, to the host; problems with its labels, and views of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Self

from recoup.cost.host_link import Link
from recoup.ir.decision import Decision, Region
from recoup.planner.incumbents import Incumbents
from recoup.planner.repair import repaired
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Proposals, Strategy
from recoup.planner.views import View, ViewSet
from recoup.runtime.offload.offloaded_saved_tensor import MIN_BYTES
from recoup.solver.offload import ALL_KINDS, Assumption, depths, with_offload
from recoup.solver.problem import Problem
from recoup.thresholds import MOST_TRIES


def problems_with_offload(problem: Problem, link: Link, host_bytes: float | None = None) -> list[Problem]:
    """Returns one problem with offload labels for each plausible assumption about what copies cost.

    Args:
        host_bytes: that the labels of one problem may move together; None: all there is. With a limit there is a
            problem for each kind of label.
    """
    kinds = (ALL_KINDS,) if host_bytes is None else (*((kind,) for kind in ALL_KINDS), ())
    assumptions: list[tuple[Assumption, int]] = [("exposed", 0)]
    if link.overlaps:
        assumptions = [*(("window", depth) for depth in depths(problem)), ("hidden", 0), ("exposed", 0)]
    made = [
        with_offload(
            problem,
            out_seconds=1 / link.out_bytes,
            back_seconds=1 / link.back_bytes,
            overlaps=link.overlaps,
            assumption=assumption,
            min_bytes=MIN_BYTES,
            depth=depth,
            host_bytes=float("inf") if host_bytes is None else host_bytes,
            kinds=those,
        )
        for those in kinds
        for assumption, depth in assumptions
    ]
    return list(dict.fromkeys(made))


def with_inputs_offloaded(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Returns the decisions with the inputs of every region moved to the host, as Unsloth does by hand."""
    return tuple(dataclasses.replace(d, offload=True) if isinstance(d, Region) else d for d in decisions)


def moving_views(step: PlannedStep, found: ViewSet, link: Link) -> tuple[View, ...]:
    """Returns views in which copies hide behind compute, hide while the link keeps up, or do not hide."""
    return tuple(
        step.views.view(f"offload {n}", problem, found.tiles, actions=step.actions, records=True)
        for n, problem in enumerate(problems_with_offload(found.problem, link, step.host_budget_bytes))
    )


class OffloadStrategy(Strategy):
    """Moves regions' inputs, and tensors that calls save, to the host and back."""

    actions: ClassVar[tuple[str, ...]] = ("offload",)

    def __init__(self, step: PlannedStep, link: Link) -> None:
        self._step = step
        self._link = link

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy if offload was asked for."""
        link = step.simulator.link
        return cls(step, link) if link is not None else None

    @functools.cached_property
    def _views(self) -> tuple[View, ...]:
        return moving_views(self._step, self._step.views.based, self._link)

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the answers of each assumption on what copies cost."""
        allowance = self._step.allowance(incumbents)
        num_repairs = MOST_TRIES if self._step.scans is None else 1
        for view in self._views:
            yield from repaired(view, budget_bytes, incumbents, allowance, num_repairs=num_repairs)

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields the leanest plan of each assumption."""
        for view in self._views:
            yield view.decide(view.solver.leanest().choice)
