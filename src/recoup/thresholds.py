"""Numbers that several rooms share: one for each idea. Shares are of a step's seconds, of a peak, or of a budget."""

from __future__ import annotations

SAME_SHARE = 0.01
"""Two figures nearer to each other than this are the same: no timing of a step tells them apart."""
NEGLIGIBLE_SHARE = 0.002
"""What gains less decides nothing: it is not worth a simulation, a tile, or a finer target."""
ESTIMATE_SHARE = 0.05
"""How far an estimate may be off, as the bound on predicted seconds is: what misses by less is tried all the same."""
MOST_TRIES = 5
"""Answers to one question that are tried: in turn, each by what the one before it was off by, or side by side."""
MOST_WAYS = 3
"""To divide one compiled graph, for calls of it that differ: each is compiled."""
SMALL_BYTES = 1 << 16
"""A tensor up to this size is copied, left where it is, or not looked up: asking takes longer than it is worth."""
ASIDE_ELEMENTS = 1 << 22
"""Of tensors that are computed, copied or compared for real beside a step, at a time: little next to the step."""
MOST_OBJECTS = 20_000
"""That are looked through for tensors from one call or function on: a larger heap is no state of a step."""
MOST_POINTS = 24
"""Of a trade-off between bytes and seconds, where each one is solved for and simulated: more change little."""
TEXT_COLUMNS = 100
"""Characters of a printed line, where there is room, and of what a user gave in a message."""
MOST_NAMES = 8
"""Of a list in a sentence or a chart, the largest first: more would not be read."""
MEASURING_SECONDS = 25.0
"""For all measurements of one kind that a plan rests on: op costs (a fitted roofline prices the rest), or pairs of
compiled steps."""
MOST_REMEMBERED_ANSWERS = 64
"""That are kept for a later question: plans, whose decisions take some ten kilobytes, and kinds of steps seen."""
