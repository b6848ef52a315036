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

A message says what was asked, what was found (numbers with units), and what to do next, and ends with its code, which
is stable and has a page in `docs/errors/`.
"""

from __future__ import annotations

from collections.abc import Sequence

CODES = {
    "E100": "input that cannot be used",
    "E101": "the target is no model",
    "E102": "the training step fails",
    "E103": "activation checkpointing is on already",
    "E104": "the plan is for another model",
    "E105": "a watched batch is too large",
    "E110": "the budget cannot be reached",
    "E200": "a replay failed",
    "E201": "weights changed before backward",
    "E202": "an argument changed before backward",
    "E203": "a tensor of the module changed before backward",
    "E204": "an iterator among the arguments",
    "E205": "the second forward saved other tensors",
    "E206": "the second forward saved other values",
    "E207": "the second forward raised an error",
    "E208": "the graph of a replay was differentiated",
    "E209": "a watched step ran out of memory",
    "E300": "the fitted step is not bit-equal",
    "E302": "a training step passed its budget",
    "E303": "a training step is not the planned one",
    "E301": "a real step is run to plan",
    "E900": "a bug in recoup",
}
"""Every code and its title. The first digit: 1 refused before anything changed, 2 in training, 3 a warning, 9 a bug."""


class RecoupError(Exception):
    """Base of every error raised by recoup.

    Attributes:
        code: a key of `CODES`, also the name of the page in `docs/errors/`.
        exit_code: what the command line returns.
    """

    code = "E900"
    exit_code = 1

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code}]"


class UsageError(RecoupError, ValueError):
    """Input that cannot be used; refused before anything was changed."""

    code = "E100"
    exit_code = 2


class TargetError(UsageError):
    """A TARGET of the command line does not name a model that can be built."""

    code = "E101"


class StepError(UsageError):
    """The training step (forward, loss or backward) fails on this model and batch."""

    code = "E102"


class ConflictError(UsageError):
    """Activation checkpointing by another library is already on in this model."""

    code = "E103"


class PlanMismatch(UsageError):
    """The plan was made for another model than the one it is applied to."""

    code = "E104"


class BatchTooLarge(UsageError):
    """A watched step would not fit its budget on this batch; it was refused before it ran."""

    code = "E105"


class InfeasibleBudget(RecoupError, RuntimeError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked.
        minimum_bytes: the smallest reachable peak; given as a budget, it works.
        phase: where in the step that peak is ("forward", "loss", "backward", "replay", "optimizer").
        tensors: the largest tensors alive there, as (what, bytes), largest first.
    """

    code = "E110"
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
    """A region was run again in backward and did not do what it did the first time.

    Attributes:
        region: the path of the module that it begins with; "" where none is known.
    """

    code = "E200"

    def __init__(self, message: str, *, code: str = "E200", region: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.region = region


class StepOutOfMemory(RecoupError, RuntimeError):
    """A watched step ran out of memory; the message says what held it and what would fit."""

    code = "E209"


class InternalError(RecoupError, RuntimeError):
    """A bug in recoup itself."""

    code = "E900"


class InexactWarning(UserWarning):
    """A fitted model's step is not bit-equal to its plain step; says what differs first."""

    code = "E300"


class RealStepWarning(UserWarning):
    """Fake tensors cannot follow the step: it is run for real on the model's GPU; says why."""

    code = "E301"


class OtherStepWarning(UserWarning):
    """A training step is not the one that the plan in place was made for: its precision, its batch, its optimizer."""

    code = "E303"


class OverBudgetWarning(UserWarning):
    """A training step under a plan peaked above the plan's budget; says by how much, and why it may."""

    code = "E302"


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, "" if it has none."""
    return next(iter(str(error).strip().splitlines()), "")
