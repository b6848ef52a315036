"""Names the parts of a plan that an export cannot express."""

from __future__ import annotations

import dataclasses

from recoup.errors import UsageError
from recoup.ir.decision import Loop, Rederive, Region, Save, Scan, TileModule
from recoup.ir.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan in somebody else's terms.

    Attributes:
        code: Python, runs without recoup.
        left_out: what the plan does and the code does not, in sentences; then the plan's prediction does not hold for
            it.
    """

    code: str
    left_out: tuple[str, ...]


def regions_of(plan: Plan, *, target: str) -> tuple[Region, ...]:
    """Returns the regions.

    Raises:
        UsageError: if there are none, or one holds for some calls of its module only.
    """
    if not plan.regions and any(isinstance(d, Scan) for d in plan.decisions):
        raise UsageError(
            f"The plan recomputes steps of scans only, which {target} does not know. Apply it with "
            "`recoup.apply(model, plan)`, or give the scan its bytes: `scan(..., budget=...)`."
        )
    if not plan.regions:
        raise UsageError(
            f"The plan has no regions, and only those can be exported to {target}. Make one with "
            "`recoup plan TARGET --actions recompute`."
        )
    numbered = next((d for d in plan.regions if d.call is not None), None)
    if numbered is not None:
        raise UsageError(
            f"The plan tells calls of `{numbered.path}` apart (call {numbered.call}), which {target} cannot. "
            "Apply it with `recoup.apply(model, plan)`."
        )
    partly = next((d for d in plan.regions if isinstance(d, Loop) and d.calls is not None), None)
    if partly is not None:
        raise UsageError(
            f"The plan recomputes the first {partly.calls} calls of `{partly.path}` only, which {target} cannot. "
            "Apply it with `recoup.apply(model, plan)`."
        )
    return plan.regions


def left_out(plan: Plan) -> tuple[str, ...]:
    """Returns the parts of a plan that only recoup's engine can run."""
    rederives = [d for d in plan.decisions if d.rederives]
    others = sorted({d.verb for d in plan.decisions if not isinstance(d, Save | Rederive | Region | Scan | TileModule)})
    sentences = []
    if rederives:
        sentences.append(
            f"{len(rederives)} decisions rederive; PyTorch has no such action, so those tensors are saved and the peak "
            "is higher. A plan made with `--actions recompute` exports whole."
        )
    keeping = [d for d in plan.regions if d.keep]
    if keeping:
        sentences.append(
            f"{len(keeping)} regions keep results ({', '.join(keeping[0].keep)}); here everything in them runs again"
        )
    chunked = [d for d in plan.regions if isinstance(d, Loop)]
    if chunked:
        sentences.append(
            f"`{chunked[0].path}` is recomputed {chunked[0].chunk} calls at a time; here each call is a region and "
            "keeps its own inputs"
        )
    if any(d.offload for d in plan.regions):
        sentences.append("inputs of regions go to the host; here they stay on the device")
    scans = [d for d in plan.decisions if isinstance(d, Scan)]
    if scans:
        sentences.append(
            f"bytes of {len(scans)} scans (`{scans[0].path}`) are left out: they run by their own schedules; give "
            "`scan(..., budget=...)` the plan's `budget_bytes`"
        )
    tiled = [d for d in plan.decisions if isinstance(d, TileModule)]
    if tiled:
        sentences.append(
            f"{len(tiled)} modules over tiles (`{tiled[0].path}`); PyTorch has no such action, so they run whole"
        )
    sentences += [f"action {action!r} is left out" for action in others]
    return tuple(sentences)


def changed_again(plan: Plan) -> tuple[str, ...]:
    """Returns what a target does that runs a region's forward again and does nothing about the region's buffers."""
    buffers = sorted({name for d in plan.regions for name in d.buffers})
    if not buffers:
        return ()
    more = ", ..." if len(buffers) > 4 else ""
    return (f"a second run changes these buffers again: {', '.join(buffers[:4])}{more}",)


def header(plan: Plan, *, what: str, sentences: tuple[str, ...]) -> str:
    """Returns the docstring of an exported file."""
    from recoup.units import format_bytes

    predicted = plan.predicted
    lines = [
        f'"""{what} for {plan.model_class} on {plan.device}.',
        "",
        f"Made by recoup for a budget of {format_bytes(plan.budget_bytes)}; needs PyTorch, not recoup.",
    ]
    if sentences:
        lines += ["Not the whole plan:", *(f"- {s}" for s in sentences)]
    else:
        lines.append(
            f"Predicted: peak {format_bytes(predicted.peak_bytes)}, {100 * predicted.extra_time_ratio:+.1f} % time."
        )
    return "\n".join([*lines, '"""', ""])
