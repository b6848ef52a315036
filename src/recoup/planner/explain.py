"""From a planner and a plan to why: each kind of choice taken away in turn and simulated, and the budgets beside it."""

from __future__ import annotations

from collections.abc import Sequence

from recoup import progress
from recoup.ir.decision import Decision, Save, describe_decisions, kinds
from recoup.ir.explanation import Explanation, Price, Trade
from recoup.planner.driver import Planner
from recoup.planner.incumbents import Candidate
from recoup.thresholds import MOST_NAMES

_RECORDED = Save(path="")


def explain(planner: Planner, candidate: Candidate, *, budget_bytes: int, step_bytes: int | None = None) -> Explanation:
    """Returns why a plan is what it is.

    Args:
        planner: what made the plan.
        candidate: the plan, simulated.
        budget_bytes: what it was made for.
        step_bytes: how far away the budgets beside it are; a sixteenth of the plain peak if left out.
    """
    step_bytes = step_bytes or max(planner.plain.peak_bytes // 16, 1)
    prices = []
    for members in kinds(candidate.decisions)[:MOST_NAMES]:
        label = "; ".join(line for line in describe_decisions(members) if line != "save everywhere else")
        progress.advance(f"pricing: {label}")
        without = planner.simulate(_without(candidate.decisions, members))
        prices.append(
            Price(
                choice=label,
                freed_peak_bytes=without.peak_bytes - candidate.peak_bytes,
                freed_saved_bytes=without.saved_bytes - candidate.saved_bytes,
                extra_seconds=candidate.step_seconds - without.step_seconds,
            )
        )
    prices.sort(key=lambda price: -price.bytes_per_second)
    has_room = candidate.peak_bytes <= budget_bytes - step_bytes  # the plan would be the same: less than it needs, then
    less = planner.fit((candidate.peak_bytes if has_room else budget_bytes) - step_bytes)
    more = planner.fit(budget_bytes + step_bytes) if candidate.decisions else None
    return Explanation(
        peak_bytes=candidate.peak_bytes,
        phase=candidate.phase,
        tensors=candidate.tensors,
        step_seconds=candidate.step_seconds,
        plain_step_seconds=planner.plain.step_seconds,
        prices=tuple(prices),
        step_bytes=step_bytes,
        less=None if less is None else trade(candidate, less),
        more=None if more is None else trade(candidate, more),
        cost_source=planner.priced.source,
    )


def trade(first: Candidate, second: Candidate) -> Trade:
    """Returns the difference between two plans for one step."""
    return Trade(
        from_bytes=first.peak_bytes,
        to_bytes=second.peak_bytes,
        from_seconds=first.step_seconds,
        to_seconds=second.step_seconds,
        to_does=tuple(describe_decisions(second.decisions)),
    )


def _without(decisions: Sequence[Decision], members: Sequence[Decision]) -> tuple[Decision, ...]:
    """Returns the decisions that are left; regions' inputs may still be rebuilt as before."""
    left = tuple(d for d in decisions if not any(d is m for m in members))
    if not left or (left[0].path != "" and decisions[0].path == ""):
        left = (_RECORDED, *left)
    return () if left == (_RECORDED,) else left
