"""What a choice costs, by walking it: the reference that every algorithm here is judged by.

Forward, `level` is the sum of what the moves so far left saved; a move peaks at `level + forward_bytes`. Backward runs
in reverse: a move peaks at the level before it, plus the gradients of everything after it, plus its own
`backward_bytes`. A region's backward replays it: its saved inputs, then a whole inner step from level zero.
"""

from __future__ import annotations

from collections.abc import Sequence

from recoup.solve.sequence import Line, Pick


def evaluate(line: Line, choice: Sequence[Pick], *, start: int = 0) -> tuple[int, float, int]:
    """Returns (peak bytes above the fixed ones, extra seconds, extra FLOPs) of a choice over the line from `start`.

    The optimizer's own peak is not part of it.
    """
    peak, level, seconds, flops = 0, 0, 0.0, 0
    end = start + (choice[-1].last if choice else 0)
    sums = line.gradient_sums
    for pick in choice:
        gradients_after = int(sums[end] - sums[start + pick.last])
        if pick.action == "recompute":
            stretch = line.stretches[pick.stretch]
            first = start + pick.first
            inner_peak, inner_seconds, inner_flops = evaluate(line, pick.inner, start=first)
            forward = stretch.forward_bytes
            backward = stretch.saved_bytes + stretch.replay_bytes + inner_peak
            saved = stretch.saved_bytes
            seconds += stretch.seconds + inner_seconds
            flops += stretch.flops + inner_flops
        else:
            forward = backward = saved = 0
            stop = start + pick.last
            for i in range(start + pick.first, stop):
                options = line.leaves[i].options
                option = next((o for o in options if o.action == pick.action), options[0])
                after = int(sums[stop] - sums[i + 1])
                forward = max(forward, saved + option.forward_bytes)
                backward = max(backward, saved + after + option.backward_bytes)
                saved += option.saved_bytes
                seconds += option.extra_seconds
                flops += option.extra_flops
        peak = max(peak, level + forward, level + gradients_after + backward)
        level += saved
    return peak, seconds, flops


def uniform(line: Line, first: int, last: int, action: str) -> tuple[Pick, ...]:
    """Returns the choice that runs leaves [first, last) under one action, where they have it."""
    picks = []
    for i in range(first, last):
        options = line.leaves[i].options
        chosen = action if any(o.action == action for o in options) else options[0].action
        picks.append(Pick(first=i - first, last=i - first + 1, action=chosen))
    return tuple(picks)
