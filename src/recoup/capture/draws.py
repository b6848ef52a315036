"""Steps that draw from python's or numpy's random numbers which layers they run: the draws that are tried for a plan.

The lowest and the highest numbers there are answer `random() < p` and `random() > p` one way every time, so that all
that is dropped by chance runs for once; seeds are for what takes another form.
"""

from __future__ import annotations

import random
import sys

AS_IT_IS = 0
_LOWEST, _HIGHEST = 1, 2
EXTREMES = (_LOWEST, _HIGHEST)
SEEDED = (3, 4, 5, 6, 7, 8)  # tried where the extremes differ
_WORDS = 624  # of both streams' state (Mersenne twister)
_SET_WORDS = 312  # half of them: 156 numbers; who asks until a number lies elsewhere comes to the rest


def draw_from(draw: int) -> None:
    """Sets python's and numpy's streams to a draw; the caller puts them back."""
    if draw == AS_IT_IS:
        return
    words = list(random.Random(draw).getstate()[1][:_WORDS])
    if draw in EXTREMES:
        words[:_SET_WORDS] = [_before_tempering(0xFFFFFFFF if draw == _HIGHEST else 0)] * _SET_WORDS
    random.setstate((3, (*words, 0), None))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0))


def _before_tempering(number: int) -> int:
    """Returns the word of the twister's state that gives a number of 32 bits."""
    number ^= number >> 18
    number ^= (number << 15) & 0xEFC60000
    found = number
    for _ in range(4):
        found = number ^ ((found << 7) & 0x9D2C5680)
    number = found = found & 0xFFFFFFFF
    for _ in range(2):
        found = number ^ (found >> 11)
    return found & 0xFFFFFFFF
