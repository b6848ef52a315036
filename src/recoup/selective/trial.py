"""Strategies tried on a model and a batch: each one's regions as a plan, run and measured beside the plain step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recoup import progress
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.cost.measured import MeasuredCost
from recoup.errors import UsageError
from recoup.evidence.verify import verify_plan
from recoup.ir.decision import Rederive
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.planner.driver import Planner, is_on_meta
from recoup.planner.host_calibration import host_costs
from recoup.planner.incumbents import Candidate
from recoup.runtime.conflicts import refuse_conflicts
from recoup.selective.config import CheckpointConfig
from recoup.selective.profile_report import ProfileReport
from recoup.selective.profiler import MemoryProfiler
from recoup.selective.strategies import choose

TRIED = ("full", "every-2", "sequential", "selective", "rederive", "budget")


def check_strategies(strategies: Iterable[str]) -> None:
    """Raises UsageError for a strategy that is not one of `TRIED`."""
    for strategy in strategies:
        if strategy not in TRIED:
            raise UsageError(f"Unknown strategy {strategy!r} to try. Choose from {', '.join(TRIED)}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One strategy: the modules that it recomputes, and its measured bytes and seconds."""

    strategy: str
    plan: Plan
    evidence: Evidence

    @property
    def memory_saved(self) -> float:
        """The share of the plain step's measured peak that is gone: 0.3 is 30 %."""
        plain = self.evidence.baseline_peak_bytes
        return 1 - self.evidence.peak_bytes / plain if plain else 0.0


class Trials:
    """A model with its captured, priced step, on which strategies are tried; nothing of the model changes."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        objective: Objective = Objective(),
        optimizer: OptimizerLike | None = None,
    ) -> None:
        if is_on_meta(model):
            raise UsageError(f"{type(model).__name__} is on `meta`: there is nothing to measure. Build it on a device.")
        refuse_conflicts(model)
        self.model, self.batch, self.objective, self.optimizer = model, batch, objective, optimizer
        parameter = next(model.parameters(), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")
        on_cuda = self.device.type == "cuda"
        spec = StepSpec(
            model=model,
            batch=batch,
            objective=objective,
            optimizer=optimizer,
            dialect="cuda" if on_cuda else "cpu",
            round_bytes=MIN_BLOCK_BYTES if on_cuda else 1,
        )
        self.planner = Planner(spec, cost=MeasuredCost(self.device, host_costs=host_costs()), actions=None)
        self._report: ProfileReport | None = None

    def report(self, num_runs: int = 3) -> ProfileReport:
        """Returns the layers' profile, taken once."""
        if self._report is None:
            progress.advance("profiling the layers")
            profiler = MemoryProfiler(self.model)
            profiler.objective = self.objective
            self._report = profiler.profile(self.batch, num_runs)
        return self._report

    def threshold_mb(self) -> float:
        """Returns the line for "selective": half of what a layer that frees something keeps on average."""
        worth = [layer.activation_mb for layer in self.report().layers if layer.freed_bytes > 0]
        return sum(worth) / len(worth) / 2 if worth else 0.0

    def candidate(self, strategy: str) -> Candidate:
        """Returns the strategy's decisions with what their simulation says.

        Raises:
            UsageError: if it is not one of `TRIED`, or finds nothing to work on in this model.
        """
        check_strategies([strategy])
        if strategy == "rederive":
            return self.planner.simulate((Rederive(path=""),))
        if strategy == "budget":
            found = self.planner.fit(self.candidate("full").peak_bytes)  # in the same bytes, so that times compare
            return found if found is not None else self.planner.smallest()
        if strategy == "selective":
            config = CheckpointConfig(strategy="selective", memory_threshold_mb=self.threshold_mb())
            return self.planner.simulate(choose(config, self.model, self.report()).decisions)
        every = 2 if strategy == "every-2" else 1
        config = CheckpointConfig(strategy="sequential" if strategy == "sequential" else "full", every=every)
        return self.planner.simulate(choose(config, self.model, None).decisions)

    def run(self, strategy: str, *, timed: bool = False) -> Trial:
        """Returns the strategy run and measured beside the plain step."""
        progress.advance(f"trying {strategy}")
        candidate = self.candidate(strategy)
        plan = self.planner.plan(
            candidate, budget_bytes=candidate.peak_bytes, budget_text=strategy, device=self.device.type
        )
        evidence = verify_plan(
            self.model,
            plan,
            self.batch,
            objective=self.objective,
            optimizer=self.optimizer,
            timed=timed,
            max_seconds=5.0,
        )
        return Trial(strategy=strategy, plan=plan, evidence=evidence)
