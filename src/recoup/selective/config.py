"""Configuration of activation checkpointing: plain data that refuses bad values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from recoup.errors import UsageError
from recoup.units import check_budget

STRATEGIES = ("none", "full", "selective", "sequential", "budget")


@dataclasses.dataclass
class CheckpointConfig:
    """Choice of what to recompute in backward.

    Attributes:
        enabled: False leaves every model as it is.
        strategy: "none"; "full": every layer is a region (or every k-th, see `every`); "selective": the layers whose
            activations exceed `memory_threshold_mb`; "sequential": segments of consecutive layers; "budget": what
            `recoup.plan` finds for `budget`.
        memory_threshold_mb: MiB of activations of one layer, for "selective".
        use_reentrant: accepted for code that sets it; regions are never reentrant (a warning says so).
        preserve_rng_state: accepted likewise; random numbers are always replayed exactly.
        snn_timestep_checkpoint: checkpoint an unrolled model over time, in segments of `snn_chunk_size` steps.
        sequential_segments: how many; None: round(sqrt(n)) (Chen et al., arXiv 1604.06174).
        profile_before_apply: "selective" asks the profiler for a report if none is given; False: only
            `include_patterns` decide then.
        profile_num_runs: steps a profile is taken over.
        exclude_patterns: never recomputed: names of presets (`recoup.selective.PRESETS`), or fnmatch patterns of dotted
            paths.
        include_patterns: always recomputed; where both match, exclude wins and a warning says so.
        every: for "full": a region of every k-th layer, beginning with the first.
        budget: for "budget": peak of the step, as in `recoup.plan`.
        op_policy: inside regions, results that are kept: a name of `recoup.selective.OP_POLICIES`, or torch's own
            form `f(context, op, *args, **kwargs) -> CheckpointPolicy`.
    """

    enabled: bool = False
    strategy: str = "selective"
    memory_threshold_mb: float = 50.0
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    snn_timestep_checkpoint: bool = False
    snn_chunk_size: int = 1
    sequential_segments: int | None = None
    profile_before_apply: bool = True
    profile_num_runs: int = 3
    exclude_patterns: Sequence[str] = ()
    include_patterns: Sequence[str] = ()
    every: int = 1
    budget: int | str | None = None
    op_policy: str | Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises UsageError if a value cannot be used; called again when the configuration is applied."""
        for name in (
            "enabled",
            "use_reentrant",
            "preserve_rng_state",
            "snn_timestep_checkpoint",
            "profile_before_apply",
        ):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        if self.strategy not in STRATEGIES:
            raise UsageError(f"Unknown strategy {self.strategy!r}. Choose from {', '.join(STRATEGIES)}.")
        threshold = self.memory_threshold_mb
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
            raise UsageError(f"memory_threshold_mb must be a number of MiB; got {threshold!r}.")
        if threshold < 0:
            raise UsageError(f"memory_threshold_mb must not be negative; got {threshold!r} MiB.")
        for name in ("snn_chunk_size", "profile_num_runs", "every"):
            _check_count(name, getattr(self, name))
        if self.sequential_segments is not None:
            _check_count("sequential_segments", self.sequential_segments)
        for name in ("exclude_patterns", "include_patterns"):
            _check_patterns(name, getattr(self, name))
        self._check_together()

    def _check_together(self) -> None:
        if self.strategy == "budget" and self.budget is None:
            raise UsageError("strategy='budget' needs budget=..., for instance budget='8GiB' or budget='60%'.")
        if self.budget is not None:
            check_budget(self.budget)
            if self.strategy != "budget":
                raise UsageError(
                    f"budget={self.budget!r} has no meaning with strategy={self.strategy!r}: use 'budget'."
                )
        if self.every != 1 and self.strategy != "full":
            raise UsageError(f"every={self.every} has no meaning with strategy={self.strategy!r}: use 'full'.")
        if self.op_policy is not None:
            if self.strategy == "budget":
                raise UsageError(
                    "op_policy has no meaning with strategy='budget': a plan decides by itself what to keep."
                )
            if self.snn_timestep_checkpoint:
                raise UsageError("op_policy and snn_timestep_checkpoint cannot be combined: choose one.")
            if not isinstance(self.op_policy, str) and not callable(self.op_policy):
                raise UsageError(f"op_policy must be a name or a function; got {type(self.op_policy).__name__}.")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number; got {value!r}.")
    if value < 1:
        raise UsageError(f"{name} must be at least 1; got {value}.")


def _check_patterns(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise UsageError(f"{name} must be a sequence of patterns; got the string {value!r}. Write [{value!r}].")
    if not isinstance(value, Sequence):
        raise UsageError(f"{name} must be a sequence of patterns; got {type(value).__name__}.")
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise UsageError(
                f"{name} holds {pattern!r}; each must be a pattern such as 'layers.*', or a preset's name."
            )
