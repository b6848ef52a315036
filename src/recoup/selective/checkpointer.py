"""`SelectiveCheckpointer`: applies a `CheckpointConfig` to a model, all or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from recoup import api
from recoup.errors import UsageError
from recoup.ir.plan import Plan
from recoup.recurrent.timesteps import checkpoint_timesteps
from recoup.runtime.apply import apply_decisions
from recoup.runtime.conflicts import refuse_conflicts
from recoup.selective.config import CheckpointConfig
from recoup.selective.ops import checkpoint_ops, find_policy
from recoup.selective.profile_report import ProfileReport
from recoup.selective.profiler import MemoryProfiler
from recoup.selective.strategies import choose
from recoup.selective.wrapper import warn_of_settings


class SelectiveCheckpointer:
    """Makes the layers that the configuration chooses regions, in place and undoably.

    Args:
        config: what is wanted.
        profiler: has profiled a batch ("selective" reads its report, "budget" plans for its batch), or None.

    Attributes:
        plan: for strategy "budget", the plan in place; else None.
    """

    def __init__(self, config: CheckpointConfig, profiler: MemoryProfiler | None = None) -> None:
        if not isinstance(config, CheckpointConfig):
            raise UsageError(f"SelectiveCheckpointer needs a CheckpointConfig; got {type(config).__name__}.")
        if profiler is not None and not isinstance(profiler, MemoryProfiler):
            raise UsageError(f"profiler must be a MemoryProfiler or None; got {type(profiler).__name__}.")
        self.config = config
        self.profiler = profiler
        self.plan: Plan | None = None
        self._layers: list[str] = []
        self._undo: Callable[[], None] | None = None

    def apply(self, model: nn.Module, profile_report: ProfileReport | None = None) -> nn.Module:
        """Changes `model` in place and returns it; a configuration that is not enabled changes nothing.

        Args:
            profile_report: for "selective"; left out: the profiler's last one, or a new one over the profiler's batch.

        Raises:
            UsageError: if the configuration cannot be carried out on this model.
            ConflictError: if activation checkpointing is on already.
            InfeasibleBudget: for "budget". The model is unchanged then.
        """
        config = self.config
        config.check()
        if not isinstance(model, nn.Module):
            raise UsageError(f"apply needs a torch.nn.Module; got {type(model).__name__}.")
        if profile_report is not None and not isinstance(profile_report, ProfileReport):
            raise UsageError(f"profile_report must be a ProfileReport; got {type(profile_report).__name__}.")
        if not config.enabled:
            return model
        refuse_conflicts(model)
        if self._undo is not None:
            raise UsageError("This SelectiveCheckpointer has a model already. Call remove() first, or make another.")
        if config.strategy == "none" and not config.include_patterns and not config.snn_timestep_checkpoint:
            return model
        if config.snn_timestep_checkpoint:
            self._undo = checkpoint_timesteps(model, chunk=config.snn_chunk_size).remove
            return model
        warn_of_settings(use_reentrant=config.use_reentrant, preserve_rng_state=config.preserve_rng_state)
        if config.strategy == "budget":
            return self._apply_budget(model)
        policy = find_policy(config.op_policy) if config.op_policy is not None else None
        chosen = choose(config, model, profile_report or self._report(model))
        told = list(chosen.warnings)
        if not chosen.groups and config.strategy != "none":
            told.append(f"strategy={config.strategy!r} found nothing to recompute in {type(model).__name__}")
        if policy is None:
            undo = apply_decisions(model, chosen.decisions).remove
        else:
            undo = checkpoint_ops(model, policy, paths=chosen.paths).remove
        try:
            if told:
                warnings.warn("; ".join(told) + ".", stacklevel=2)
        except Warning:  # warnings are errors here: nothing may be left half done
            undo()
            raise
        self._undo, self._layers = undo, chosen.paths
        return model

    def get_checkpointed_layers(self) -> list[str]:
        """Returns the dotted paths of the modules that are recomputed now, in model order; may be empty."""
        return list(self._layers)

    def remove(self) -> None:
        """Restores the model; safe to call twice."""
        if self._undo is not None:
            self._undo()
        self._undo, self._layers, self.plan = None, [], None

    def _report(self, model: nn.Module) -> ProfileReport | None:
        profiler, config = self.profiler, self.config
        if config.strategy != "selective" or profiler is None:
            return None
        if profiler.report is None or not config.profile_before_apply:
            return profiler.report
        if profiler.model is model and profiler.report.num_runs < config.profile_num_runs:
            return profiler.profile(profiler.sample_input, config.profile_num_runs)
        return profiler.report

    def _apply_budget(self, model: nn.Module) -> nn.Module:
        config, profiler = self.config, self.profiler
        if config.exclude_patterns or config.include_patterns:
            raise UsageError(
                "include_patterns and exclude_patterns have no meaning with strategy='budget': the plan chooses. Use "
                "strategy='selective' to choose by name."
            )
        if profiler is None or profiler.sample_input is None:
            raise UsageError(
                "strategy='budget' plans for a batch: give SelectiveCheckpointer(config, profiler) a MemoryProfiler "
                "that has profiled one, or call recoup.fit(model, batch, budget=...)."
            )
        assert config.budget is not None  # checked with the configuration
        made = api.plan(model, profiler.sample_input, budget=config.budget, loss=profiler.objective.loss)
        self._undo = api.apply(model, made).remove
        self._layers = _paths(made)
        self.plan = made
        return model

    def __repr__(self) -> str:
        state: Any = f"{len(self._layers)} layers" if self._undo is not None else "nothing applied"
        return f"SelectiveCheckpointer(strategy={self.config.strategy!r}, {state})"


def _paths(plan: Plan) -> list[str]:
    return [path for d in plan.regions for path in d.paths]
