"""Whether a short chain of recorded ops leads from kept tensors to a value, and which tensors it starts from."""

from __future__ import annotations

import weakref

import torch

from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.kept import Kept, Source
from recoup.runtime.rebuild.values import Made, Value

MAX_OPS = 14  # of one chain: more than any block's cheap ops, so that a search ends
_MAX_TRAFFIC_RATIO = 3 * MAX_OPS  # bytes that a chain may move for each byte it rebuilds: as ops of two inputs do


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether the storage has its memory: FSDP takes a unit's parameters away when its forward ends.

    What is there when a tensor is saved is there when its unit runs backward: it belongs to the same unit, or stays.
    Not so under ZeRO-3, which marks its parameters and gathers each for its own module only.
    """
    if type(tensor) is not torch.Tensor and hasattr(tensor, "ds_id"):
        return False
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


class _Search:
    """Looks for a chain from kept tensors to a value, within a bound on ops and on bytes moved."""

    __slots__ = ("ops", "seen", "sources", "traffic_bytes")

    def __init__(self, traffic_bytes: float) -> None:
        self.ops = MAX_OPS
        self.traffic_bytes = traffic_bytes
        self.seen: set[int] = set()
        self.sources: list[Source] = []

    def reach(self, value: Value) -> bool:
        """Whether a chain leads to the value; `seen` has the values that were reached, or are being searched."""
        if value.constant is not None:
            constant = value.constant
            if constant.copy is None and (
                constant.tensor._version != constant.version or not _is_there(constant.tensor)
            ):
                return False
            constant.is_source = True
            return True
        seen = self.seen
        if value.kept is not None and (kept := value.alive()) is not None:
            if type(kept) is Kept and not _is_there(kept.tensor):
                return False
            self.sources.append(kept)
            seen.add(id(value))
            return True
        made = value.made
        if made is None:
            return False
        self.ops -= 1
        self.traffic_bytes -= made.traffic_bytes
        if self.ops < 0 or self.traffic_bytes < 0:
            return False
        seen.add(id(value))
        for read in made.reads:
            if id(read.value) not in seen and not self.reach(read.value):
                return False
        if made.outputs and value.output == 0 and shortcuts.has_shortcut(op_facts(made.function), made.args):
            self._hold_side_results(made)
        return True

    def _hold_side_results(self, made: Made) -> None:
        """Holds the op's other results as long as the first may be unpacked, if they are kept at all."""
        values = [ref() for ref in made.outputs[1:]]
        kept = [k for k in (value.alive() for value in values if value is not None) if k is not None]
        if len(kept) == len(values):
            self.sources += kept
            made.side_results = tuple(weakref.ref(k) for k in kept)


def find_sources(value: Value, num_bytes: int) -> list[Source] | None:
    """Returns the kept tensors that a chain to `value` starts from; None where no chain is short enough.

    Args:
        num_bytes: of the saved tensor that would be rebuilt, which bounds the bytes that its chain may move.
    """
    search = _Search(_MAX_TRAFFIC_RATIO * num_bytes)
    return search.sources if search.reach(value) else None
