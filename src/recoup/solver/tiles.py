"""Which calls are worth running over tiles of positions, and of how many: from a trace's bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from recoup.ir.labels import without_numbers
from recoup.ir.trace import Call, Trace
from recoup.thresholds import NEGLIGIBLE_SHARE

FEWEST_ROWS = 64  # of a tile: matmuls of fewer rows are slow everywhere
_LARGE_SHARE = 0.5  # of what the largest kind needs: these are tiled first, all kinds where that is not enough


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileKind:
    """Calls of equal layers that may be run over tiles.

    Attributes:
        paths: in call order.
        inner_bytes: peak bytes of what one of them allocates in its forward, without its result.
        input_bytes: of its largest argument.
    """

    name: str
    paths: tuple[str, ...]
    inner_bytes: int
    input_bytes: int

    def tile_tokens(self, tokens: int) -> int:
        """Returns how many tokens make a tile that takes what the call is given: at least 64, tiles of equal size."""
        most = max(tokens * self.input_bytes // self.inner_bytes, min(FEWEST_ROWS, tokens), 1)
        num_tiles = -(-tokens // most)
        return -(-tokens // num_tiles)


def tile_kinds(trace: Trace, *, peak_bytes: int) -> list[TileKind]:
    """Returns the kinds of calls that hold twice as much inside as they are given, the largest first.

    Args:
        trace: of the plain step.
        peak_bytes: its peak.
    """
    calls: dict[str, list[Call]] = {}
    for call in trace.calls:
        if call.path and not call.runs_once and not call.refusal and not call.draws_random and not call.mutated_buffers:
            calls.setdefault(without_numbers(call.path), []).append(call)
    found = []
    for name, members in calls.items():
        given = max((trace.storages[i].nbytes for i in members[0].inputs), default=0)
        inner = max(_inner_bytes(trace, call) for call in members)
        if given and inner >= max(2 * given, NEGLIGIBLE_SHARE * peak_bytes):
            paths = tuple(dict.fromkeys(call.path for call in members))
            found.append(TileKind(name=name, paths=paths, inner_bytes=inner, input_bytes=given))
    return sorted(found, key=lambda kind: -kind.inner_bytes)


def _inner_bytes(trace: Trace, call: Call) -> int:
    """Returns the peak bytes of the call's own tensors in forward, without its result."""
    changes = [0] * (call.last_op - call.first_op + 1)
    outputs = set(call.outputs)
    for index, storage in enumerate(trace.storages):
        if call.first_op <= storage.alloc_op < call.last_op and index not in outputs:
            changes[storage.alloc_op - call.first_op] += storage.nbytes
            changes[min(storage.free_op + 1, call.last_op) - call.first_op] -= storage.nbytes
    most = level = 0
    for change in changes:
        level += change
        most = max(most, level)
    return most


def outermost(kinds: Sequence[TileKind], provable: Container[str]) -> list[TileKind]:
    """Returns the kinds whose calls were proved position-wise, without those that lie inside another of them.

    Args:
        provable: paths that were proved.
    """
    proved = [kind for kind in kinds if kind.paths[0] in provable]
    return [k for k in proved if not any(k.paths[0].startswith(f"{o.paths[0]}.") for o in proved)]


def sets_to_try(kinds: Sequence[TileKind]) -> list[list[TileKind]]:
    """Returns sets of kinds to tile together: those that need about as much as the largest, and smaller ones."""
    if not kinds:
        return []
    large = [k for k in kinds if k.inner_bytes >= _LARGE_SHARE * kinds[0].inner_bytes]
    return [large] if len(large) == len(kinds) else [large, list(kinds)]
