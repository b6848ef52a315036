"""Every error recoup raises, in one tree.

    RecoupError
    +-- UsageError (ValueError)            bad input: a budget, a batch, a target; nothing was changed     exit 2
    |   +-- TargetError                    a command-line TARGET that cannot be turned into a model
    |   +-- StepError                      the training step itself fails on this model and batch
    |   +-- ConflictError                  the model already has activation checkpointing on
    |   +-- PlanMismatch                   the plan was made for another model
    |   +-- BatchTooLarge                  a watched step that would not fit; it was not run
    +-- InfeasibleBudget (RuntimeError)    no plan reaches the budget                                       exit 3
    +-- ReplayError (RuntimeError)         a region's second forward was not the first one                  exit 1
    +-- StepOutOfMemory (RuntimeError)     a watched step ran out of memory                                 exit 1
    +-- InternalError (RuntimeError)       a bug in recoup                                                  exit 1

A message says what was asked, what was found (numbers with units), and what to do next. `code` is stable.
"""

from __future__ import annotations

from collections.abc import Sequence


class RecoupError(Exception):
    """Base of every error raised by recoup.

    Attributes:
        code: stable short name, also the name of the page in `docs/errors/`.
        exit_code: what the command line returns.
    """

    code = "recoup"
    exit_code = 1


class UsageError(RecoupError, ValueError):
    """Input that cannot be used; refused before anything was changed."""

    code = "usage"
    exit_code = 2


class TargetError(UsageError):
    """A TARGET of the command line does not name a model that can be built."""

    code = "target"


class StepError(UsageError):
    """The training step (forward, loss or backward) fails on this model and batch."""

    code = "step"


class ConflictError(UsageError):
    """Somebody else's activation checkpointing is already on in this model."""

    code = "conflict"


class PlanMismatch(UsageError):
    """The plan was made for another model than the one it is applied to."""

    code = "plan-mismatch"


class BatchTooLarge(UsageError):
    """A watched step would not fit its budget on this batch; it was refused before it ran."""

    code = "batch-too-large"


class InfeasibleBudget(RecoupError, RuntimeError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked.
        minimum_bytes: the smallest reachable peak; given as a budget, it works.
        phase: where in the step that peak is ("forward", "loss", "backward", "replay", "optimizer").
        tensors: the largest tensors alive there, as (what, bytes), largest first.
    """

    code = "infeasible-budget"
    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        minimum_bytes: int,
        phase: str,
        tensors: Sequence[tuple[str, int]],
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.phase = phase
        self.tensors = tuple(tensors)


class ReplayError(RecoupError, RuntimeError):
    """A region was run again in backward and did not do what it did the first time."""

    code = "replay"


class StepOutOfMemory(RecoupError, RuntimeError):
    """A watched step ran out of memory; the message says what held it and what would fit."""

    code = "out-of-memory"


class InternalError(RecoupError, RuntimeError):
    """A bug in recoup itself."""

    code = "internal"
