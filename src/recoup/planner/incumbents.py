"""Candidates simulated so far: those that fit, the fastest, the one with the smallest peak."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from recoup.ir.decision import Decision
from recoup.thresholds import SAME_SHARE

SEARCH_OPS = 200_000  # simulated ops of one search: some twenty steps of a model with ten thousand


Effort = Literal["low", "normal", "high"]
# Factors on what a search may simulate once a plan fits: one answer of each solver, what pays mostly, what seldom does.
EFFORTS: dict[Effort, int] = {"low": 0, "normal": 1, "high": 10}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A set of decisions and what the simulation of the applied plan says of it.

    Attributes:
        card_excess_bytes: of its peak, what the blocks of a card's allocator take beyond what lies in them.
        host_seconds: of its seconds, those that its ops do not take on the device.
        flops: of the whole step, what runs again included. product_flops: those of products, convolutions, attention.
        held_bytes: made in the model's forward, there when backward begins though autograd does not keep it.
        phase: where the peak is.
        tensors: the largest alive there, as (what, bytes).
        offloaded_bytes: moved to the host in one step.
        host_bytes: the most of them that are there at a time.
        num_collectives: that the step runs (tensor parallel).
    """

    decisions: tuple[Decision, ...]
    peak_bytes: int
    step_seconds: float
    flops: int
    recomputed_flops: int
    saved_bytes: int
    forward_saved_bytes: int
    phase: str
    tensors: tuple[tuple[str, int], ...]
    offloaded_bytes: int = 0
    host_bytes: int = 0
    num_collectives: int = 0
    num_scan_evaluations: int = 0
    product_flops: int = 0
    held_bytes: int = 0
    card_excess_bytes: int = 0
    host_seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether it is bit-equal to the plain step."""
        return all(d.is_exact for d in self.decisions)


class Judge(Protocol):
    """Says what decisions cost: the simulator, or a stand-in.

    Attributes:
        plain: the step without a plan.
        simulated: what was simulated so far, by decisions.
        num_simulated_ops: ops of all steps simulated so far: the work that limits are counted in.
    """

    plain: Candidate
    simulated: dict[tuple[Decision, ...], Candidate]
    num_simulated_ops: int

    def simulate(self, chosen: tuple[Decision, ...]) -> Candidate:
        """Returns the simulated step with `chosen` applied."""


class Incumbents:
    """The plans known so far that keep to the host's memory.

    Args:
        exact: leave out those that are not bit-equal to the plain step.

    Attributes:
        host_budget_bytes: the most that a plan may hold there at a time; None: whatever it takes.
    """

    def __init__(self, judge: Judge, *, host_budget_bytes: int | None = None, exact: bool = False) -> None:
        self._judge = judge
        self.host_budget_bytes = host_budget_bytes
        self._exact = exact

    @property
    def plain(self) -> Candidate:
        """The step without a plan."""
        return self._judge.plain

    @property
    def num_simulated_ops(self) -> int:
        """Ops of all steps simulated so far."""
        return self._judge.num_simulated_ops

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All simulated candidates, the plain step last."""
        known = (c for c in self._judge.simulated.values() if self.keeps_to_host(c))
        return (*(c for c in known if c.is_exact or not self._exact), self.plain)

    def keeps_to_host(self, candidate: Candidate) -> bool:
        """Whether a candidate stays within the budget of host memory."""
        return self.host_budget_bytes is None or candidate.host_bytes <= self.host_budget_bytes

    def fitting(self, budget_bytes: int, *, exact: bool = False) -> list[Candidate]:
        """Returns the candidates within the budget; with `exact` only those that are bit-equal to the plain step."""
        return [c for c in self.all if c.peak_bytes <= budget_bytes and (c.is_exact or not exact)]

    def seconds(self, budget_bytes: int, *, exact: bool = False) -> float:
        """Returns the step seconds of the fastest candidate within the budget, infinity if there is none."""
        return min((c.step_seconds for c in self.fitting(budget_bytes, exact=exact)), default=float("inf"))

    def least(self) -> Candidate:
        """Returns the candidate with the smallest peak, of several one with equal bits, then the fastest."""
        return min(self.all, key=lambda c: (c.peak_bytes, not c.is_exact, c.step_seconds))

    def select(self, budget_bytes: int, *, prefers_equal_bits: bool) -> Candidate | None:
        """Returns the fastest candidate within the budget, None if there is none.

        Within what timing can tell apart it is the one with the least product of seconds and FLOPs: more predicted time
        is taken only where it saves a larger share of FLOPs.

        Args:
            prefers_equal_bits: leave out what rounds differently, if anything else fits.
        """
        fitting = self.fitting(budget_bytes)
        if prefers_equal_bits:
            fitting = self.fitting(budget_bytes, exact=True) or fitting
        if not fitting:
            return None
        fastest = min(c.step_seconds for c in fitting)
        equal = [c for c in fitting if c.step_seconds <= fastest * (1 + SAME_SHARE)]
        return min(
            equal,
            key=lambda c: (
                c.step_seconds * (c.product_flops or c.flops),
                c.step_seconds,
                len(c.decisions),
                c.peak_bytes,
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How much may be simulated before a search is content with a plan that fits: work, the same on every machine.

    Attributes:
        num_ops: of simulated steps.
        began_at: ops simulated when the search began.
    """

    num_ops: int
    began_at: int

    def is_spent(self, incumbents: Incumbents) -> bool:
        """Whether the allowed ops were simulated."""
        return incumbents.num_simulated_ops - self.began_at >= self.num_ops

    def ends(self, incumbents: Incumbents, budget_bytes: int) -> bool:
        """Whether the search should end: the allowance is spent and a plan fits."""
        return self.is_spent(incumbents) and bool(incumbents.fitting(budget_bytes))
