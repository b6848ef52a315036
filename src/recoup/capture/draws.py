"""Draws of python's and numpy's random numbers that are tried for steps that choose layers by chance (layer drop).

With only low, or only high numbers, every `random() < p` and `random() > p` has the same answer, so one of the two
draws runs all layers that are dropped by chance. They are as many as the step drew as it is: a loop that waits for
another number goes on no longer than that. Seeds cover other forms of choice.
"""

from __future__ import annotations

import enum
import random
import sys
from typing import Any, NamedTuple


class Draw(enum.IntEnum):
    """What the streams are set to for a capture: the state they are in, an extreme, or a seed's numbers."""

    AS_IT_IS = 0
    LOW = 1
    HIGH = 2


EXTREMES = (Draw.LOW, Draw.HIGH)
SEEDED = range(3, 9)  # draws tried where the extremes differ, by seed
_EXTREME_WORDS = {Draw.LOW: 0x00000FFF, Draw.HIGH: 0xFFFFF000}  # 1e-6 from 0 and from 1, of which logarithms are taken


class Words(NamedTuple):
    """Numbers of 32 bits that a step draws of each stream; a number in [0, 1) takes two."""

    python: int = 0
    numpy: int = 0


NO_WORDS = Words()


class Streams(NamedTuple):
    """Where the streams are: the twister's state and the place in it, of python's and of numpy's if that is one."""

    python: tuple[Any, int]
    numpy: tuple[Any, int] | None

    @classmethod
    def now(cls) -> Streams:
        """Returns where they are."""
        *words, at = random.getstate()[1]
        found = _state_of_numpy()
        return cls((words, at), None if found is None else (found["key"].tolist(), int(found["pos"])))

    def drawn_until(self, now: Streams) -> Words:
        """Returns how many numbers were drawn since, up to the second time that a state was used up."""

        def count(before: tuple[Any, int] | None, after: tuple[Any, int] | None) -> int:
            if before is None or after is None:
                return 0
            return after[1] - before[1] + (len(before[0]) if before[0] != after[0] else 0)

        return Words(count(self.python, now.python), count(self.numpy, now.numpy))


def draw_from(draw: int, num: Words = NO_WORDS) -> None:
    """Sets python's and numpy's streams to a draw; the caller puts them back.

    Args:
        num: of an extreme, how many numbers there are of it; at most half of the state.
    """
    if draw == Draw.AS_IT_IS:
        return

    def words(num_extreme: int) -> list[int]:
        found: list[int]
        *found, _ = random.Random(draw).getstate()[1]  # of either stream: both are Mersenne twisters
        if draw in EXTREMES:
            num_extreme = min(num_extreme, len(found) // 2)
            found[:num_extreme] = [_before_tempering(_EXTREME_WORDS[Draw(draw)])] * num_extreme
        return found

    random.setstate((3, (*words(num.python), 0), None))
    if _state_of_numpy() is not None:
        numpy = sys.modules["numpy"]
        numpy.random.set_state(("MT19937", numpy.array(words(num.numpy), dtype=numpy.uint32), 0))


def _state_of_numpy() -> dict[str, Any] | None:
    """Returns the state of numpy's global stream; None without numpy, or with another kind of stream."""
    numpy = sys.modules.get("numpy")
    found = {} if numpy is None else numpy.random.get_state(legacy=False)
    return found["state"] if found.get("bit_generator") == "MT19937" else None


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
