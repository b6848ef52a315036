"""Rotor's dynamic programme (Herrmann et al., arXiv 1911.13214), written from the paper's recurrence, as a judge.

C[s, t](m) is the least extra time of stages s..t in m memory slots, the stages' gradients and transients included:

- keep everything of stage s:  C[s + 1, t](m - saved_s), if s fits forward and backward;
- keep only the input of s, run s..k again later (s <= k < t):  seconds_s..k + C[k + 1, t](m - input_s)
  + C[s, k](m - input_s - what is in flight).

One slot is `helpers.UNIT` bytes; chains of `helpers.random_chain` are whole slots, so nothing is rounded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recoup.solver.problem import Block, Leaf, Problem, Region

from .helpers import UNIT

Times = npt.NDArray[np.float64]


def rotor_times(problem: Problem, num_slots: int) -> Times:
    """Returns the least extra seconds of a chain for every memory of 0..num_slots slots (inf where nothing fits)."""
    root = problem.parts[0]
    assert isinstance(root, Block)
    leaves: list[Leaf] = []
    regions: list[Region] = []
    for block in root.parts:
        assert isinstance(block, Block) and block.region is not None and isinstance(block.parts[0], Leaf)
        leaves.append(block.parts[0])
        regions.append(block.region)
    count = len(leaves)
    gradients = np.concatenate([[0], np.cumsum([leaf.gradient_bytes // UNIT for leaf in leaves])])
    seconds = np.concatenate([[0.0], np.cumsum([region.seconds for region in regions])])
    best: dict[tuple[int, int], Times] = {}
    for s in range(count - 1, -1, -1):
        option = leaves[s].options[0]
        for t in range(s, count):
            kept = best.get((s + 1, t), np.zeros(num_slots + 1))
            after = int(gradients[t + 1] - gradients[s + 1])
            times = _shift(kept, option.saved_bytes // UNIT)
            times[: max(option.forward_bytes // UNIT, option.backward_bytes // UNIT + after)] = np.inf
            forward = 0
            pinned = regions[s].saved_bytes // UNIT
            for k in range(s, t):
                forward = max(forward, regions[k].forward_bytes // UNIT)
                in_flight = regions[k].replay_bytes // UNIT + int(gradients[t + 1] - gradients[k + 1])
                again = _shift(best[k + 1, t], pinned) + _shift(best[s, k], pinned + in_flight)
                again += seconds[k + 1] - seconds[s]
                again[:forward] = np.inf
                np.minimum(times, again, out=times)
            best[s, t] = times
    return best[0, count - 1]


def _shift(times: Times, slots: int) -> Times:
    """Returns the times as a function of memory of which `slots` are taken."""
    shifted = np.full(len(times), np.inf)
    if slots < len(times):
        shifted[slots:] = times[: len(times) - slots]
    return shifted
