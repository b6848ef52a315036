"""When Python looks for garbage: a full collection looks at every object of the process, which can take a second."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def few_full_collections() -> Iterator[None]:
    """Delays full garbage collections inside the block: capturing and planning leave few reference cycles.

    Objects made in the block are still in the two young generations at its end, where `gc.collect(1)` finds them.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, (1 << 31) - 1, old)  # the most there is: never
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Disables the garbage collector while many small objects are made, none of them in a reference cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
