"""Draws of python's and numpy's random numbers that are tried for steps that choose layers by chance (layer drop).

With only the lowest, or only the highest numbers, every `random() < p` and `random() > p` has the same answer, so one
of the two draws runs all layers that are dropped by chance. Seeds cover other forms of choice.
"""

from __future__ import annotations

import enum
import random
import sys


class Draw(enum.IntEnum):
    """What the streams are set to for a capture: the state they are in, an extreme, or a seed's numbers."""

    AS_IT_IS = 0
    LOWEST = 1
    HIGHEST = 2


EXTREMES = (Draw.LOWEST, Draw.HIGHEST)
SEEDED = range(3, 9)  # draws tried where the extremes differ, by seed


def draw_from(draw: int) -> None:
    """Sets python's and numpy's streams to a draw; the caller puts them back."""
    if draw == Draw.AS_IT_IS:
        return
    *words, _ = random.Random(draw).getstate()[1]  # of both streams (Mersenne twister), and the place in them
    if draw in EXTREMES:
        half = len(words) // 2  # 156 numbers; who asks until a number lies elsewhere comes to the rest
        words[:half] = [_before_tempering(0xFFFFFFFF if draw == Draw.HIGHEST else 0)] * half
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
