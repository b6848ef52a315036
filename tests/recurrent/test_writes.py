"""What tells a write on a device that must not be waited for: the ops, not the contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from recoup.recurrent.dead_state import Writes

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda t: t.add_(1),
    "through data": lambda t: t.data.mul_(2),
    "through a view": lambda t: t[1:].zero_(),
    "out": lambda t: torch.add(torch.ones(4), 1, out=t),
    "many at once": lambda t: torch._foreach_add_([torch.ones(2), t], 1.0),
    "statistics": lambda t: F.batch_norm(torch.ones(2, 4), t, torch.ones(4), training=True),
}
READS: dict[str, Callable[[torch.Tensor], object]] = {
    "added": lambda t: t + 1,
    "in eval mode": lambda t: F.batch_norm(torch.ones(2, 4), t, torch.ones(4), training=False),
}


@pytest.mark.parametrize("name", [*WRITES, *READS])
def test_writes_are_told_from_reads(name: str) -> None:
    tensor = torch.zeros(4)
    with Writes() as writes:
        (WRITES | READS)[name](tensor)
    assert writes.has_written(tensor) == (name in WRITES)
