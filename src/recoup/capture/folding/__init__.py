"""Loops over time, captured in part: the one entrance of this room, nothing outside imports its files.

`Folding` replaces repeated calls of a loop by marks while a step is captured, `unfold` expands the marks into ops
afterwards, and `FoldingMemory` carries what one capture learned about a step's loops to the next. `Counted` and
`Irregular` abort a capture that has to start over: with the numbers of calls known, or without folding.
"""

from __future__ import annotations

from recoup.capture.folding.fold import Folding
from recoup.capture.folding.unfold import unfold
from recoup.capture.folding.zones import Counted, FoldingMemory, Irregular

__all__ = ["Counted", "Folding", "FoldingMemory", "Irregular", "unfold"]
