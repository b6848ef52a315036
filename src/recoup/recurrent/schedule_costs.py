"""Estimated step evaluations of a scan's schedules by bytes, for planning.

The schedule itself is computed when the scan runs (`choose.py`). Here long loops are divided into blocks of steps and
memory into few units, so that a dozen budgets take milliseconds.
"""

from __future__ import annotations

import math

from recoup.recurrent.schedules.tapes import solve
from recoup.recurrent.schedules.weighted import MAX_BLOCKS

_RUNG_RATIO = 0.8  # from one rung's bytes to the next one's
_MAX_EVALUATIONS = 8  # of a step: the last bytes cost as many more as all the others together


def evaluations_by_bytes(
    num_steps: int, *, state_bytes: int, tape_bytes: int, in_row_bytes: int
) -> list[tuple[int, int]]:
    """Returns (bytes for states and tapes, step evaluations) pairs in falling order of bytes.

    The first pair has all steps taped; the last one evaluates a step 8 times, or holds one taped step only.

    Args:
        state_bytes: bytes of a held state.
        tape_bytes: bytes of a taped step.
        in_row_bytes: bytes of a taped step that another taped step follows.
    """
    end_bytes = tape_bytes - in_row_bytes
    found = [(num_steps * in_row_bytes + end_bytes, num_steps)]
    room = float(found[0][0])
    while room > tape_bytes:
        room = max(room * _RUNG_RATIO, float(tape_bytes))
        block = max(1, min(math.ceil(num_steps / MAX_BLOCKS), int(room // (4 * tape_bytes))))
        num_blocks = -(-num_steps // block)
        tape = max(1, min(round(MAX_BLOCKS * block * in_row_bytes / room), block * in_row_bytes))
        unit = block * in_row_bytes / tape  # a tape is a whole number of units, so that nothing is lost to rounding
        units, state, end = int(room / unit), math.ceil(max(state_bytes, 1) / unit), math.ceil(end_bytes / unit)
        if units < tape + end:
            break
        evaluations = solve(num_blocks, units, state, tape, end).evaluations()
        if not 0 < evaluations <= _MAX_EVALUATIONS * num_blocks:
            break
        found.append((int(room), round(evaluations * num_steps / num_blocks)))
    return found
