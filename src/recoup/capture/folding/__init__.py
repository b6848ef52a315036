"""Loops over time, captured in part: the one entrance of this room, nothing outside imports its files.

`Folding` stands for calls of a loop that are like those that ran, `unfold` writes them into the trace afterwards,
`FoldingMemory` is what one capture of a step tells the next. `Counted` and `Irregular` end a capture that has to be
begun again: with the numbers of calls known, or in full.
"""

from __future__ import annotations

from recoup.capture.folding.fold import Folding
from recoup.capture.folding.unfold import unfold
from recoup.capture.folding.zones import Counted, FoldingMemory, Irregular

__all__ = ["Counted", "Folding", "FoldingMemory", "Irregular", "unfold"]
