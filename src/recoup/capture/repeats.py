"""Tiles whose ops repeat the tile before them: recorded in a capture without being run.

A tiled call runs the same ops on each of its tiles. Of equal tiles a capture runs the first three or four, and the
last one. If the last two that ran recorded the same, op by op and storage by storage, the tiles after them are copies
of that recording at later op indices. A storage that lives into the next tile (a running sum) is freed there; that of
the last copy, in the tile that runs. The trace equals that of a full capture, except for the offsets of views.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from recoup import _torch
from recoup.capture.records import OpRecord, StorageRecord
from recoup.ir.trace import Signature
from recoup.runtime.rebuild.lineage import Recorder


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """How far a tracker has come.

    Attributes:
        others: what it notes besides ops, storages and writes; a tile that adds to it is run.
    """

    num_ops: int
    num_storages: int
    num_writes: int
    others: tuple[int, ...]


class Recording(Protocol):
    """The interface of the tracker that is needed here."""

    ops: list[OpRecord]
    writes: list[tuple[int, int]]
    signatures: list[Signature]
    random_ops: list[int]
    save_ops: list[Any]
    rederive_links: list[Any]
    copies: list[Any]
    saves: list[Any]
    num_rederived: int
    bridge: Any

    @property
    def storages(self) -> list[StorageRecord]:
        """All storages, with all that died so far."""

    @property
    def fake_mode(self) -> Any:
        """The mode of the step's fake tensors; None for a real step."""

    def add_like(self, first: Place, end: Place, moving: Sequence[Moving], number: int) -> None:
        """Appends a copy of the recording between two places, shifted by `number` tiles."""

    def hand_on(self, successors: dict[int, int]) -> None:
        """Gives living storages other indices: {old: new}."""


def place_of(tracker: Recording) -> Place:
    """Returns how far a tracker has come."""
    noted = (tracker.random_ops, tracker.save_ops, tracker.rederive_links, tracker.copies, tracker.saves)
    others = (*map(len, noted), tracker.num_rederived)
    return Place(len(tracker.ops), len(tracker.storages), len(tracker.writes), others)


def repeat(tracker: Recording, places: Sequence[Place], times: int) -> bool:
    """Appends `times` copies of the last tile; False, and nothing, if the last two differ or an observer needs the ops.

    Args:
        places: where tiles began, and where the last one ended.
    """
    first, second, end = places[-3:]
    num_ops, num_storages = second.num_ops - first.num_ops, second.num_storages - first.num_storages
    is_same_size = (end.num_ops - second.num_ops, end.num_storages - second.num_storages) == (num_ops, num_storages)
    modes = _torch.dispatch_modes()
    is_seen_by_us = all(m is tracker or (isinstance(m, Recorder) and m.is_cheap) for m in modes)
    if not num_ops or not is_same_size or first.others != end.others or not is_seen_by_us:
        return False
    if tracker.fake_mode is None or tracker.bridge is not None:
        return False
    pairs = zip(tracker.ops[first.num_ops : second.num_ops], tracker.ops[second.num_ops : end.num_ops], strict=True)
    ops = [
        moving
        for a, b in pairs
        if _is_same_op(a, b, tracker.signatures) and (moving := _moving(a, b, num_ops, num_storages)) is not None
    ]
    made = tracker.storages[second.num_storages : end.num_storages]
    before = tracker.storages[first.num_storages : second.num_storages]
    lasting = [i for i, record in enumerate(before) if record.free_op >= second.num_ops]
    if len(ops) < num_ops or not all(
        _is_alike(a, b, num_ops, lasts=i in lasting) for i, (a, b) in enumerate(zip(before, made, strict=True))
    ):
        return False
    earlier = tracker.writes[first.num_writes : second.num_writes]
    writes = tracker.writes[second.num_writes : end.num_writes]
    moves = _moves([s for _, s in earlier], [s for _, s in writes], num_storages)
    if moves is None:
        return False
    for i in lasting:  # it dies where the one before it did, a tile later
        made[i].free_op = before[i].free_op + num_ops
    for number in range(1, times + 1):
        tracker.add_like(second, end, ops, number)
        tracker.writes += [
            (op + number * num_ops, storage + number * move) for (op, storage), move in zip(writes, moves, strict=True)
        ]
    tracker.hand_on({second.num_storages + i: len(tracker.storages) - num_storages + i for i in lasting})
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Moving:
    """The shift of an op's indices from tile to tile: of its origin, inputs and outputs."""

    origin: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def moved(self, op: OpRecord, number: int) -> OpRecord:
        """Returns the op with its indices shifted by `number` tiles."""
        return op.like(
            op.call,
            op.origin + number * self.origin,
            tuple(i + number * move for i, move in zip(op.inputs, self.inputs, strict=True)),
            tuple(i + number * move for i, move in zip(op.outputs, self.outputs, strict=True)),
        )


def _is_same_op(before: OpRecord, op: OpRecord, signatures: Sequence[Signature]) -> bool:
    """Whether two tiles' ops are the same; of views it is enough that they are of one op: where they begin differs."""
    if op.signature < 0 or (op.call, op.phase, op.replayed) != (before.call, before.phase, before.replayed):
        return False
    one, other = signatures[before.signature], signatures[op.signature]
    return one is other or (one.is_view and other.is_view and one.name == other.name)


def _moving(before: OpRecord, op: OpRecord, num_ops: int, num_storages: int) -> Moving | None:
    """Returns the shift between two tiles' ops; None if they differ in anything else."""
    origin = _moves([before.origin], [op.origin], num_ops)
    inputs = _moves(before.inputs, op.inputs, num_storages)
    outputs = _moves(before.outputs, op.outputs, num_storages)
    return None if origin is None or inputs is None or outputs is None else Moving(origin[0], inputs, outputs)


def _moves(before: Sequence[int], after: Sequence[int], by: int) -> tuple[int, ...] | None:
    """Returns by how much each index moved, nothing or `by`; None if one moved by something else."""
    found = tuple(b - a for a, b in zip(before, after, strict=False))
    return found if len(before) == len(after) and all(move in (0, by) for move in found) else None


def _is_alike(before: StorageRecord, record: StorageRecord, num_ops: int, *, lasts: bool) -> bool:
    """Whether two tiles' storages are of one kind and live as long. `lasts`: into the next tile, and no longer."""
    kinds = [(r.nbytes, r.category, r.label, r.saved_ops, r.saved_by) for r in (before, record)]
    if kinds[0] != kinds[1] or before.saved_by or before.alloc_op < 0 or before.free_op < 0:
        return False
    ends = record.free_op == -1 if lasts else record.free_op == before.free_op + num_ops
    return ends and record.alloc_op == before.alloc_op + num_ops
