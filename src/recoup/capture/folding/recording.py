"""Extracts the patterns of a folded loop's executed calls from the recording."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

from recoup.capture.folding.fold import Folding
from recoup.capture.folding.folded_loop import Loop
from recoup.capture.folding.observed import Block
from recoup.capture.folding.patterns import Name, Pattern, Ref, Segment, Stepping
from recoup.capture.folding.surface import Surface
from recoup.capture.folding.zones import Irregular, Zone
from recoup.capture.module_calls import CallRecorder
from recoup.capture.tracker import Tracker


class Recording:
    """The recording of a run with folded calls, divided into calls and the gaps between them."""

    def __init__(self, folding: Folding) -> None:
        self.tracker: Tracker = folding.tracker
        self.recorder: CallRecorder = folding.recorder
        self.loops: dict[str, Loop] = folding.loops
        tracker = self.tracker
        if tracker.copies:
            raise Irregular("", "tensors are moved to the host")
        self.num_ops = len(tracker.ops)
        self.marks = [*tracker.marks, (len(tracker.storages), tracker.num_rederived)]
        self.write_ops = [op for op, _ in tracker.writes]
        self.deaths: dict[int, list[int]] = {}
        for index, record in enumerate(tracker.storages):
            if record.free_op >= 0:
                self.deaths.setdefault(record.free_op, []).append(index)
        self.segments = self._segments()
        self.starts = [s.storages[0] for s in self.segments]
        self.by_key = {s.key: s for s in self.segments}
        self.slots: dict[int, tuple[str, str, int, int]] = {}  # storage -> (kind, path, call, result or input)
        for path, loop in self.loops.items():
            for kind, blocks in (("F", loop.forwards), ("B", loop.backwards)):
                for block in blocks.values():
                    for storage, slot in block.slots.items():
                        self.slots[storage] = (kind, path, block.index, slot)
        self._signatures: dict[str, int] = {}
        self.classes: dict[tuple[str, int], tuple[Zone | None, int]] = {}
        self.inflows: dict[tuple[str, int, int], int] = {}  # (path, class, input) -> which storage of the backward
        self.patterns: dict[tuple[str, str, int], Pattern] = {}

    # -- the recording in segments ------------------------------------------------------------------------------

    def _segments(self) -> list[Segment]:
        blocks: list[tuple[str, Block]] = []
        for loop in self.loops.values():
            blocks += [("F", b) for b in loop.forwards.values() if b.ops[1] > b.ops[0]]
            blocks += [("B", b) for b in self._backwards(loop)]
        blocks.sort(key=lambda item: item[1].ops[0])
        segments: list[Segment] = []
        at, key = 0, ("pre", "", 0)
        saves = links = 0
        for kind, block in [*blocks, ("end", Block("", 0, False, (self.num_ops, self.num_ops)))]:
            if block.ops[0] < at:
                raise Irregular(block.path, "its calls overlap")
            is_forward = kind == "F"
            to = (block.saves[0], block.links[0]) if is_forward else (saves, links)
            if kind == "end":
                to = len(self.tracker.saves), len(self.tracker.rederive_links)
            if kind == "B" and segments and segments[-1].key[0] == "F":
                to = len(self.tracker.saves), len(self.tracker.rederive_links)
            gap = Segment(key, None, (at, block.ops[0]), (self.marks[at][0], self.marks[block.ops[0]][0]))
            gap.saves, gap.links = (saves, to[0]), (links, to[1])
            segments.append(gap)
            saves, links = to
            if kind == "end":
                break
            at = block.ops[1]
            own = Segment(
                (kind, block.path, block.index), block, block.ops, (self.marks[block.ops[0]][0], self.marks[at][0])
            )
            if is_forward:
                own.saves, own.links, own.rederived = block.saves, block.links, block.rederived
                saves, links = block.saves[1], block.links[1]
            else:
                own.saves, own.links = (saves, saves), (links, links)
                own.rederived = 0 if block.folded else self.marks[at][1] - self.marks[block.ops[0]][1]
            segments.append(own)
            key = ("g" + kind, block.path, block.index)
        return segments

    def _backwards(self, loop: Loop) -> list[Block]:
        """Returns the backward of each call; of executed ones it is found by the call that each op belongs to."""
        owner: dict[int, int] = {}
        for block in loop.forwards.values():
            if not block.folded:
                owner.update(dict.fromkeys(range(*block.calls), block.index))
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.tracker.ops):
            if op.phase == "backward" and op.signature >= 0 and op.call in owner:
                span = found.setdefault(owner[op.call], [i, i])
                if i - span[1] > 1:
                    raise Irregular(loop.path, "a call's backward runs in parts")
                span[1] = i
        made = [
            Block(
                path=loop.path,
                index=index,
                folded=False,
                ops=(first, last + 1),
                given=loop.forwards[index].given,
            )
            for index, (first, last) in found.items()
        ]
        return made + list(loop.backwards.values())

    def name_of(self, storage: int) -> Name | None:
        """Returns the name of a storage; None for one that was there before."""
        at = bisect.bisect_right(self.starts, storage) - 1
        if at < 0:
            return None
        segment = self.segments[at]
        slot = self.slots.get(storage)
        if slot is not None:
            kind, path, index, number = slot
            if kind == "F":
                return ("F", path, index, self.surface_of(path, index).results[number].storage)
            inflow = self.inflows.get((path, self.class_of(path, index), number))
            return None if inflow is None else ("B", path, index, inflow)
        if segment.key[0] == "pre":
            return None
        return (*segment.key, storage - segment.storages[0])

    def zone_of(self, path: str, index: int) -> Zone | None:
        """Returns the zone of a call."""
        return self.place_of(path, index)[0]

    def place_of(self, path: str, index: int) -> tuple[Zone | None, int]:
        """Returns the zone of a call, and the first folded call of its kind."""
        found = self.classes.get((path, index))
        if found is None:
            zone = next((z for z in self.loops[path].zones if z.start <= index < z.stop), None)
            found = (zone, zone.low + (index - zone.low) % zone.period if zone is not None else -1)
            self.classes[path, index] = found
        return found

    def class_of(self, path: str, index: int) -> int:
        """Returns the first folded call of a call's kind."""
        return self.place_of(path, index)[1]

    def surface_of(self, path: str, index: int) -> Surface:
        """Returns the surface that stands for a call."""
        zone, first = self.place_of(path, index)
        assert zone is not None
        return self.loops[path].surfaces[first - zone.period]

    # -- relative recordings ------------------------------------------------------------------------------------

    def pattern_of(self, kind: str, path: str, index: int) -> Pattern:
        """Returns the pattern of a call, from the two calls of its class executed before folded ones."""
        zone, first = self.place_of(path, index)
        assert zone is not None
        known = self.patterns.get((kind, path, first))
        if known is not None:
            return known
        place = first - zone.low
        if kind in ("F", "gF"):
            one, other = zone.low - zone.period + place, zone.high + place
        else:
            one, other = zone.high + place, zone.high + zone.period + place
        pair = [self.by_key.get((kind, path, i)) for i in (one, other)]
        if pair[0] is None or pair[1] is None:
            raise Irregular(path, f"call {one} or {other} leaves nothing to compare with")
        pattern = self._unify(self.relative(pair[0]), self.relative(pair[1]), one, other, path)
        if kind == "B" and pattern.reaches_back(zone.period):
            raise Irregular(path, "gradients are summed up over more than one round of its calls")
        self.patterns[kind, path, first] = pattern
        return pattern

    def refs_of(self, storage: int, segment: Segment) -> tuple[Ref, Ref]:
        """Returns the two references to a storage: relative to a segment, and absolute."""
        name = self.name_of(storage)
        itself = ("same", storage)
        if name is None:
            return itself, itself
        if name[:3] == segment.key:
            own = ("own", name[3])
            return own, own
        return ("at", name[0], name[1], name[2] - segment.key[2], name[3]), itself

    def relative(self, segment: Segment) -> Pattern:
        """Returns a segment's recording with pairs of references, see `refs_of`; `_unify` leaves one of each pair."""
        tracker = self.tracker
        kind, path, index = segment.key
        first, last = segment.ops
        is_gap = segment.block is None
        call = origin = 0
        if not is_gap:
            forward = self.by_key["F", path, index]
            assert forward.block is not None
            call, origin = forward.block.calls[0], forward.ops[0]

        def refs(storages: Any) -> Any:
            return tuple(self.refs_of(s, segment) for s in storages)

        ops = []
        for i in range(first, last):
            op = tracker.ops[i]
            where = (op.call - call, op.origin - origin) if not is_gap else (0, 0)
            if not is_gap and not (where[0] >= 0 and 0 <= where[1] < forward.ops[1] - forward.ops[0]):
                raise Irregular(path, "an op stems from outside of its call")
            signature = op.signature if not is_gap else self.kind_of(op.signature)
            arguments = refs(op.inputs), refs(op.outputs)
            ops.append((signature, op.phase, op.replayed, *where, *arguments, op.begins_call, op.sums))
        births = []
        for s in range(*segment.storages):
            record = tracker.storages[s]
            if s in self.slots:
                continue
            dies = record.free_op - first if first <= record.free_op < last else None
            births.append((record.nbytes, "temporary", record.label, record.alloc_op - first, dies))
            if record.alloc_op < 0:
                raise Irregular(path, "it reads a tensor that nothing was known of")
        deaths = [
            (self.refs_of(s, segment), i - first)
            for i in range(first, last)
            for s in self.deaths.get(i, ())
            if not segment.storages[0] <= s < segment.storages[1]
        ]
        saves = [
            (at - first, of - call if not is_gap else 0, self.refs_of(s, segment), at - by)
            for at, of, s, by in tracker.saves[slice(*segment.saves)]
        ]
        low, high = (bisect.bisect_left(self.write_ops, i) for i in (first, last))
        writes = [(op - first, self.refs_of(s, segment)) for op, s in tracker.writes[low:high]]
        links = [(op - first, refs(sources)) for op, sources in tracker.rederive_links[slice(*segment.links)]]
        low, high = (bisect.bisect_left(tracker.random_ops, i) for i in (first, last))
        calls = []
        if kind == "F" and segment.block is not None:
            for i in range(segment.block.calls[0] + 1, segment.block.calls[1]):
                inner = self.recorder.calls[i]
                calls.append(
                    (
                        inner.path,
                        inner.kind,
                        inner.parent - call,
                        tuple(c - call for c in inner.children),
                        inner.first_op - first,
                        inner.last_op - first,
                        refs(inner.inputs),
                        refs(inner.outputs),
                        inner.input_numel,
                        inner.input_grad_bytes,
                        inner.output_grad_bytes,
                        inner.chained,
                        inner.refusal,
                    )
                )
        return Pattern(
            ops=ops,
            births=births,
            # Pairs of references where a pattern has one: `_unify` chooses.
            deaths=deaths,  # type: ignore[arg-type]
            saves=saves,  # type: ignore[arg-type]
            writes=writes,  # type: ignore[arg-type]
            links=links,
            random=[op - first for op in tracker.random_ops[low:high]],
            calls=calls,
            inputs=refs(segment.block.inputs) if kind == "F" and segment.block is not None else (),
            rederived=segment.rederived,
            given=segment.block.given if kind == "B" and segment.block is not None else None,
        )

    def kind_of(self, signature: int) -> Any:
        """Returns the part of the signature of an op outside of calls that is equal in all steps: no numbers."""
        found = self.tracker.signatures[signature]
        return found.name, len(found.args), found.flops, found.bytes_moved, found.output_bytes

    def _unify(self, one: Pattern, other: Pattern, at: int, other_at: int, path: str) -> Pattern:
        """Returns the common recording of two calls: of each pair of references the one that is equal in both.

        Raises:
            Irregular: if the calls differ.
        """
        what = f"calls {at} and {other_at}"
        signatures = self.tracker.signatures

        def merge(a: Any, b: Any) -> Any:
            if _is_pair(a) and _is_pair(b):
                if a[1] == b[1]:
                    return a[1]
                if a[0] == b[0]:
                    return a[0]
                raise Irregular(path, f"{what} touch other tensors: {a} {b}")
            if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
                if len(a) != len(b):
                    raise Irregular(path, f"{what} differ")
                return type(a)(merge(x, y) for x, y in zip(a, b, strict=True))
            if a != b:
                raise Irregular(path, f"{what} differ: {a} {b}")
            return a

        fields = {}
        for field in dataclasses.fields(Pattern):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "deaths":
                a, b = sorted(a, key=_death_order), sorted(b, key=_death_order)
            if field.name == "ops" and len(a) == len(b):
                for i, (x, y) in enumerate(zip(a, b, strict=True)):
                    if x[0] != y[0] and isinstance(x[0], int):
                        stepping = Stepping(signatures[x[0]], signatures[y[0]], at, other_at - at)
                        if not stepping.is_even():
                            raise Irregular(path, f"{what} run other ops: {stepping.one} {stepping.other}")
                        a[i], b[i] = (stepping, *x[1:]), (stepping, *y[1:])
            fields[field.name] = merge(a, b)
        return Pattern(**fields)


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and all(isinstance(ref, tuple) and len(ref) > 1 and ref[0] in ("own", "at", "same") for ref in item)
    )


def _death_order(death: Any) -> Any:
    (relative, _), op = death
    return op, str(relative)
