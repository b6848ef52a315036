"""Cost of a choice, by walking it: the reference that every algorithm here is judged by.

- Forward: `level` starts at the fixed bytes. A leaf with option o peaks at `level + o.forward_bytes` and leaves
  `o.saved_bytes`. A region peaks at `level + forward_bytes` and leaves its `saved_bytes`.
- Backward runs in reverse. A step of the walk peaks at the level before it, plus the gradients of everything after it
  (they accumulate), plus `o.backward_bytes`, which hold the leaf's own saved bytes and gradients.
- A region's backward replays it: its `saved_bytes`, its `replay_bytes`, and the peak of a whole inner step (forward,
  then backward) from level zero, with the inner choice. Its time is one more forward plus the inner extra time. What
  the inner step saved is gone after it; its gradients stay.
- A span is one region over consecutive calls; `sequence.combine` says what it costs.
- Everything not chosen as a region is its parts, inlined in order.
- The step's peak is the largest of all these and of the optimizer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from recoup.ir.decision import Ambient
from recoup.solver.problem import Leaf, Option, Problem
from recoup.solver.sequence import Choice, Line, Pick, price_of
from recoup.solver.ways import Run


def evaluate(problem: Problem, choice: Choice) -> tuple[int, float, int]:
    """Returns (peak bytes of the whole step, extra seconds, extra FLOPs) of a choice.

    Args:
        problem: what the choice was made for.
        choice: covers every leaf of the problem, in order.
    """
    return evaluate_line(Line(problem), choice)


def evaluate_line(line: Line, choice: Choice) -> tuple[int, float, int]:
    """Same as `evaluate`, for a problem that is laid out already."""
    peak, seconds, flops = _walk(line, choice, 0, len(line.leaves))
    problem = line.problem
    return max(problem.fixed_bytes + peak, problem.optimizer_peak_bytes), seconds, flops


def _walk(line: Line, choice: Sequence[Pick], start: int, end: int) -> tuple[int, float, int]:
    peak, level, seconds, flops = 0, 0, 0.0, 0
    at = start
    for pick in choice:
        assert start + pick.first == at, "a choice covers every leaf, in order"
        at = start + pick.last
        gradients_after = line.gradient_sums[end] - line.gradient_sums[at]
        region = price_of(line, pick, start)
        if region is not None:
            inner_peak, inner_seconds, inner_flops = _walk(line, pick.inner, start + pick.first, at)
            saved, forward = region.saved_bytes, region.forward_bytes
            backward = region.saved_bytes + region.replay_bytes + inner_peak
            seconds += region.seconds + inner_seconds
            flops += region.flops + inner_flops
        else:
            assert isinstance(pick.way, Run), "what has no region's price is a leaf"
            option = option_of(line.leaves[start + pick.first], pick.way)
            saved, forward, backward = option.saved_bytes, option.forward_bytes, option.backward_bytes
            seconds += option.extra_seconds
            flops += option.extra_flops
        peak = max(peak, level + forward, level + gradients_after + backward, level + saved)
        level += saved
    assert at == end, "a choice covers every leaf"
    return peak, seconds, flops


def option_of(leaf: Leaf, way: Run) -> Option:
    """Returns the leaf's option for a way to run; a leaf that lacks it runs under its first one, whatever is asked."""
    return next((o for o in leaf.options if o.ambient == way.ambient and o.rung == way.rung), leaf.options[0])


def uniform(line: Line, first: int, last: int, ambient: Ambient) -> Choice:
    """Returns the choice that runs leaves [first, last) under one action, where they have it."""
    found = [option_of(leaf, Run(ambient)) for leaf in line.leaves[first:last]]
    return tuple(Pick(first=i, last=i + 1, way=Run(o.ambient, o.rung)) for i, o in enumerate(found))
