"""Plans, applies and proves a plan until what is in place is what was promised, or says that nothing is.

What verification finds is planned around: a measured peak above the budget (an allocator does what no simulation saw)
asks for as many bytes less; a region that cannot run twice asks for a plan in which it, and modules of its kind, run
once; values that differ for no region's sake ask for a plan without the action that may have changed them; a step that
runs out of memory, though its plan should fit, asks for a smaller one.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from recoup import progress
from recoup.errors import InfeasibleBudget, ReplayError, StepOutOfMemory, UsageError
from recoup.ir.decision import TileLoss, TileModule
from recoup.ir.evidence import Evidence
from recoup.ir.labels import without_numbers
from recoup.ir.plan import Plan
from recoup.planner.driver import Planner, plan_for_budget
from recoup.runtime.apply import Applied, apply_decisions
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES, NEGLIGIBLE_SHARE
from recoup.units import format_at_least, format_bytes, is_minimum

MakePlanner = Callable[[frozenset[str], Sequence[str] | None], Planner]


def paths_below(model: nn.Module, keep: Iterable[str]) -> frozenset[str]:
    """Returns the paths of some modules and of all modules in them.

    Raises:
        UsageError: for a path that the model does not have.
    """
    if isinstance(keep, str):
        keep = (keep,)
    if not isinstance(keep, Iterable):
        raise UsageError(f"keep must be paths of modules; got {keep!r}.")
    modules = dict(model.named_modules(remove_duplicate=False))
    inside: set[int] = set()
    for path in keep:
        if path not in modules:
            close = difflib.get_close_matches(str(path), modules, n=1)
            advice = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(
                f"keep names {path!r}, and {type(model).__name__} has no module there.{advice} Paths are those of "
                "`model.named_modules()`."
            )
        inside.update(id(m) for m in modules[path].modules())
    return frozenset(path for path, module in modules.items() if id(module) in inside)


@dataclasses.dataclass(kw_only=True)
class Fitting:
    """Planning for one budget, and what was found out on the way.

    Attributes:
        make_planner: returns a planner for modules that run once and actions (None: the default ones).
        keep: what runs once.
        notes: what was left out and why, for the plan.
    """

    model: nn.Module
    make_planner: MakePlanner
    budget: int | str
    free_bytes: int | None
    device: str
    keep: frozenset[str]
    actions: Sequence[str] | None
    notes: list[str] = dataclasses.field(default_factory=list)
    _planner: Planner | None = None
    _target_bytes: int | None = None
    _budget_bytes: int = 0

    def plan(self) -> Plan:
        """Returns the fastest plan found, without the regions that a simulated step could not run twice.

        Raises:
            InfeasibleBudget: if none is left; says what was left out. What planning raises.
        """
        while True:
            self._planner = self._planner or self.make_planner(self.keep, self.actions)
            target = self.budget if self._target_bytes is None else self._target_bytes
            try:
                made, _ = plan_for_budget(self._planner, budget=target, free_bytes=self.free_bytes, device=self.device)
            except ReplayError as error:
                if not self._leave_out({error.region}, _reason(error)):
                    raise
                continue
            except InfeasibleBudget as error:
                raise self._infeasible(error) from None
            self._budget_bytes = self._budget_bytes or made.budget_bytes
            return dataclasses.replace(
                made, budget_bytes=self._budget_bytes, budget_text=str(self.budget), notes=(*made.notes, *self.notes)
            )

    def fit(self, prove: Callable[[Plan], Evidence]) -> tuple[Plan, Applied, Evidence]:
        """Returns a plan, the handle of what is in place, and its evidence; if that is not ok, no plan helped.

        Args:
            prove: verifies a plan that is in place.

        Raises:
            InfeasibleBudget: if no plan is left. What planning and verification raise; nothing is in place then.
        """
        failed: tuple[Plan, Evidence] | None = None
        ran_out: StepOutOfMemory | None = None
        num_over = 0
        while True:
            try:
                made = self.plan()
            except InfeasibleBudget as error:
                if failed is not None:
                    return failed[0], apply_decisions(self.model, ()), failed[1]
                raise ran_out or error from None
            applied = apply_decisions(self.model, made.decisions)
            try:
                progress.advance("running plain and planned steps")
                evidence = prove(made)
            except ReplayError as error:
                applied.remove()
                if not self._plan_around(made, (error.region,), _reason(error)):
                    raise
                continue
            except StepOutOfMemory as error:  # workspaces of libraries and fragments that no simulation saw
                applied.remove()
                ran_out, num_over = StepOutOfMemory(*error.args), num_over + 1  # its traceback holds the step
                less = made.predicted.peak_bytes - int(made.budget_bytes * ESTIMATE_SHARE)
                if not self._plan_for_less(made, less, num_over, "a step of another plan ran out of memory"):
                    raise
                continue
            except BaseException:
                applied.remove()
                raise
            over = evidence.peak_bytes - made.budget_bytes
            if over > 0 and is_minimum(self.budget):  # there is no plan for less: what was measured is the minimum
                words = f"{format_bytes(made.budget_bytes)} and measured {format_bytes(evidence.peak_bytes)}"
                note = f"the smallest reachable peak was predicted as {words}, which is the budget"
                made = dataclasses.replace(made, budget_bytes=evidence.peak_bytes, notes=(*made.notes, note))
                evidence, over = dataclasses.replace(evidence, budget_bytes=evidence.peak_bytes), 0
            if over <= 0 and (evidence.ok or not evidence.plain_repeats):
                return made, applied, evidence
            if over <= 0:
                failed = (made, evidence)
                reason = next(iter(evidence.differences), "it did not do what was planned")
                if not self._plan_around(made, evidence.regions_diverged, reason):
                    return made, applied, evidence
                applied.remove()
                continue
            applied.remove()
            num_over += 1
            progress.advance(f"measured {format_bytes(over)} over the budget; planning for less")
            less = made.predicted.peak_bytes - over - int(made.budget_bytes * NEGLIGIBLE_SHARE)
            if not self._plan_for_less(made, less, num_over, "another plan measured above it"):
                raise self._never_below(evidence)

    def _plan_for_less(self, made: Plan, target_bytes: int, num_over: int, reason: str) -> bool:
        """Has the next plan peak lower than one that did not fit; whether there is any lower.

        Args:
            made: what did not fit.
            target_bytes: for the next; where no plan is as small, and for the last try, the smallest there is.
            num_over: how many plans did not fit.
            reason: why, for the notes.
        """
        assert self._planner is not None  # it made the plan
        try:
            smallest = self._planner.smallest().peak_bytes
        except ReplayError:  # planning for less meets it again, and leaves the region out
            smallest = 0
        if made.predicted.peak_bytes <= smallest:
            return False
        self._target_bytes = max(target_bytes, smallest) if num_over < MOST_TRIES - 1 else smallest
        note = f"planned for less than the budget: {reason}"
        self.notes += [] if note in self.notes else [note]
        return True

    def _plan_around(self, made: Plan, culprits: Sequence[str], reason: str) -> bool:
        """Leaves something out of the next plan: regions, or an action that the plan used; whether there was any."""
        regions = [d for d in made.decisions if d.is_region and d.path in culprits]
        return self._leave_out({p for d in regions for p in d.paths}, reason) or self._use_less(made, reason)

    def _leave_out(self, paths: set[str], reason: str) -> bool:
        """Has modules of the kinds at some paths run once; whether there were any that did not yet."""
        kinds = {without_numbers(path) for path in paths if path}
        more = {path for path, _ in self.model.named_modules() if without_numbers(path) in kinds} - self.keep
        if not more:
            return False
        self.keep |= more
        names = ", ".join(f"`{kind}`" for kind in sorted(kinds))
        self._note(f"{names} cannot run twice and is in no region: {reason}")
        return True

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._planner = self._target_bytes = None  # what was over, and by how much, were other plans
        progress.advance(f"planning again: {text}")

    def _use_less(self, made: Plan, reason: str) -> bool:
        """Leaves out an action that the plan used; whether that leaves one."""
        assert self._planner is not None  # it made the plan
        actions = self._planner.actions
        used = {
            "recompute": any(d.is_region for d in made.decisions),
            "tile-modules": any(isinstance(d, TileModule) for d in made.decisions),
            "tile": any(isinstance(d, TileLoss) for d in made.decisions),
            "offload": any(d.offloads for d in made.decisions),
            "rederive": any(d.rederives for d in made.decisions),
        }
        for action, is_used in used.items():
            if is_used and action in actions:
                self.actions = tuple(a for a in actions if a != action)
                self._note(f"planned without {action}: {reason}")
                return True
        return False

    def _infeasible(self, error: InfeasibleBudget) -> InfeasibleBudget:
        """Returns the error, with what was found out and left out."""
        left_out = f" Found on the way: {'; '.join(self.notes)}." if self.notes else ""
        return InfeasibleBudget(
            error.args[0] + left_out,
            budget_bytes=self._budget_bytes or error.budget_bytes,
            minimum_bytes=error.minimum_bytes,
            phase=error.phase,
            tensors=error.tensors,
        )

    def _never_below(self, evidence: Evidence) -> InfeasibleBudget:
        """Returns the error of plans that measure above the budget, the smallest one too, whose evidence is given."""
        assert self._planner is not None
        smallest = self._planner.smallest()
        return self._infeasible(
            InfeasibleBudget(
                f"Budget {format_bytes(self._budget_bytes)} could not be met: the smallest plan measured "
                f"{format_bytes(evidence.peak_bytes)}, predicted were {format_bytes(evidence.predicted_peak_bytes)}. "
                f"Use a budget of at least {format_at_least(evidence.peak_bytes)} (or 'min'), or a smaller batch.",
                budget_bytes=self._budget_bytes,
                minimum_bytes=evidence.peak_bytes,
                phase=smallest.phase,
                tensors=smallest.tensors,
            )
        )


def _reason(error: ReplayError) -> str:
    """Returns the first sentences of a message, without its advice."""
    text: str = error.args[0]
    return text.partition(". ")[0]
