"""Programs that strangers write, by kind: each trains after `recoup.fit` as it did without, or was refused untouched.

`make hazards` runs them all and writes them down; `tests/safety/test_programs.py` holds each to it.
"""
