"""Puts in what `folding` left out: at every mark the ops that the executed calls of the loop ran there.

A storage that a call makes is named by the call and a number, one that is made between two calls by the call before.
A call's recording is *relative*: what it touches is one of its own storages, one of a call (or gap) so many calls away,
or the same storage each time. Two executed calls in a row, relative to each, must be the same recording; the calls
where executed ones begin again must be what it predicts, the ops between folded calls too. Gradients of what all
calls share go from call to call as running sums, so the first call executed after folded ones is where the sums have to
be put right: it too is taken from the relative recording, once it was found to be its equal.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

from recoup.capture.calls import CallRecord, CallRecorder
from recoup.capture.folding import Block, Folding, Irregular, Loop, Zone
from recoup.capture.tracker import OpRecord, StorageRecord, Tracker
from recoup.ir.trace import Signature

_Key = tuple[str, str, int]  # kind ("F", "B": forward and backward of a call; "gF", "gB": the ops after it), path, call
_Name = tuple[str, str, int, int]  # the key and a number
_Ref = tuple[Any, ...]  # ("own", n), ("at", kind, path, calls away, n) or ("same", storage)


@dataclasses.dataclass(slots=True)
class _Segment:
    """A stretch of the recording."""

    key: _Key
    block: Block | None
    ops: tuple[int, int]
    storages: tuple[int, int]
    saves: tuple[int, int] = (0, 0)
    links: tuple[int, int] = (0, 0)
    rederived: int = 0


@dataclasses.dataclass(slots=True)
class _Pattern:
    """A relative recording.

    Attributes:
        ops: (signature, phase, replayed, call, origin, inputs, outputs); calls and origins counted from the call's.
        births: (bytes, category, label, op, op with which it dies; None: not here). deaths: (storage, op) of others.
        saves: (ops so far, call, storage, how far before is the op that saves it). writes: (op, storage).
        calls: inside the call. inputs: what it is handed and finds. given: which results got a gradient.
    """

    ops: list[tuple[Any, ...]]
    births: list[tuple[int, str, str, int, int | None]]
    deaths: list[tuple[_Ref, int]]
    saves: list[tuple[int, int, _Ref, int]]
    writes: list[tuple[int, _Ref]]
    links: list[tuple[int, tuple[_Ref, ...]]]
    random: list[int]
    calls: list[tuple[Any, ...]]
    inputs: tuple[_Ref, ...]
    rederived: int
    given: tuple[bool, ...] | None


@dataclasses.dataclass(slots=True)
class _Copied:
    """A pattern made ready to be put in many times: each reference once, the ops with their numbers."""

    refs: list[_Ref]
    ops: list[tuple[Any, ...]]

    @classmethod
    def of(cls, pattern: _Pattern) -> _Copied:
        """Returns a pattern's."""
        numbers: dict[_Ref, int] = {}

        def count(refs: Any) -> tuple[int, ...]:
            return tuple(numbers.setdefault(ref, len(numbers)) for ref in refs)

        ops = [(*op[:5], count(op[5]), count(op[6])) for op in pattern.ops]
        return cls(list(numbers), ops)


def unfold(folding: Folding) -> None:
    """Makes the tracker's and the recorder's lists what they would be without folding.

    Raises:
        Irregular: if the executed calls do not tell; the lists are as they were then.
    """
    if folding.failed:
        raise Irregular("", folding.failed)
    if any(b.folded for loop in folding.loops.values() for b in loop.forwards.values()):
        _Unfolder(folding).run()


@dataclasses.dataclass(frozen=True, slots=True)
class _Stepping:
    """A signature with numbers that grow evenly from call to call: where a step's slice begins, say."""

    one: Signature
    other: Signature
    at: int
    away: int

    def step(self, index: int) -> Signature:
        """Returns the signature in the given call."""

        def value(a: Any, b: Any) -> Any:
            if isinstance(a, tuple):
                return tuple(value(x, y) for x, y in zip(a, b, strict=True))
            return a if a == b else a + (index - self.at) * (b - a) // self.away

        return dataclasses.replace(
            self.one, args=value(self.one.args, self.other.args), kwargs=value(self.one.kwargs, self.other.kwargs)
        )

    def is_even(self) -> bool:
        """Whether the two signatures differ in nothing but integers."""

        def is_alike(a: Any, b: Any) -> bool:
            if isinstance(a, tuple):
                return isinstance(b, tuple) and len(a) == len(b) and all(map(is_alike, a, b))
            return a == b or (type(a) is type(b) is int and (b - a) % self.away == 0)

        one, other = self.one, self.other
        return (
            is_alike(one.args, other.args)
            and is_alike(one.kwargs, other.kwargs)
            and dataclasses.replace(one, args=(), kwargs=()) == dataclasses.replace(other, args=(), kwargs=())
        )


class _Unfolder:
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
        self.inflows: dict[tuple[str, int, int], int] = {}  # (path, class, input) -> which storage of the backward
        self.patterns: dict[tuple[str, str, int], _Pattern] = {}
        # -- the new recording
        self.ops: list[OpRecord] = []
        self.storages: list[StorageRecord] = []
        self.calls: list[CallRecord] = []
        self.new_op: list[int] = []
        self.new_storage: dict[int, int] = {}
        self.bases: dict[_Key, int] = {}  # the new index of a segment's first storage
        self.sizes: dict[_Key, int] = {}
        self.copied: dict[int, _Copied] = {}
        self.classes: dict[tuple[str, int], tuple[Zone | None, int]] = {}
        self.begins: dict[_Key, int] = {}
        self.dies: dict[int, int] = {}
        self.aliases: dict[int, int] = {}
        self.saves: list[tuple[int, int, int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.links: list[tuple[int, list[int]]] = []
        self.random: list[int] = []
        self.rederived = 0

    # -- the recording in segments ------------------------------------------------------------------------------

    def _segments(self) -> list[_Segment]:
        blocks: list[tuple[str, Block]] = []
        for loop in self.loops.values():
            blocks += [("F", b) for b in loop.forwards.values() if b.ops[1] > b.ops[0]]
            blocks += [("B", b) for b in self._backwards(loop)]
        blocks.sort(key=lambda item: item[1].ops[0])
        segments: list[_Segment] = []
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
            gap = _Segment(key, None, (at, block.ops[0]), (self.marks[at][0], self.marks[block.ops[0]][0]))
            gap.saves, gap.links = (saves, to[0]), (links, to[1])
            segments.append(gap)
            saves, links = to
            if kind == "end":
                break
            at = block.ops[1]
            own = _Segment(
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
        """Returns the backward of each call: those that were run are found by the calls their ops belong to."""
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

    def _name(self, storage: int) -> _Name | None:
        """Returns the name of a storage; None for one that was there before."""
        at = bisect.bisect_right(self.starts, storage) - 1
        if at < 0:
            return None
        segment = self.segments[at]
        slot = self.slots.get(storage)
        if slot is not None:
            kind, path, index, number = slot
            if kind == "F":
                return ("F", path, index, self._surface(path, index).results[number].storage)
            inflow = self.inflows.get((path, self._class(path, index), number))
            return None if inflow is None else ("B", path, index, inflow)
        if segment.key[0] == "pre":
            return None
        return (*segment.key, storage - segment.storages[0])

    def _zone(self, path: str, index: int) -> Zone | None:
        return self._place(path, index)[0]

    def _place(self, path: str, index: int) -> tuple[Zone | None, int]:
        """Returns the zone of a call, and the first folded call of its kind."""
        found = self.classes.get((path, index))
        if found is None:
            zone = next((z for z in self.loops[path].zones if z.start <= index < z.stop), None)
            found = (zone, zone.low + (index - zone.low) % zone.period if zone is not None else -1)
            self.classes[path, index] = found
        return found

    def _class(self, path: str, index: int) -> int:
        return self._place(path, index)[1]

    def _surface(self, path: str, index: int) -> Any:
        zone, first = self._place(path, index)
        assert zone is not None
        return self.loops[path].surfaces[first - zone.period]

    # -- relative recordings ------------------------------------------------------------------------------------

    def _pattern(self, kind: str, path: str, index: int) -> _Pattern:
        """Returns what a call of the index' class does, from the two calls executed before folded ones."""
        zone, first = self._place(path, index)
        assert zone is not None
        known = self.patterns.get((kind, path, first))
        if known is not None:
            return known
        place = first - zone.low
        if kind in ("F", "gF"):
            one, other = zone.low - zone.period + place, zone.low - 2 * zone.period + place
        else:
            one, other = zone.high + place, zone.high + zone.period + place
        pair = [self.by_key.get((kind, path, i)) for i in (one, other)]
        if pair[0] is None or pair[1] is None:
            raise Irregular(path, f"call {one} or {other} leaves nothing to compare with")
        pattern = self._unify(self._relative(pair[0]), self._relative(pair[1]), one, other, path)
        self.patterns[kind, path, first] = pattern
        return pattern

    def _refs(self, storage: int, segment: _Segment) -> tuple[_Ref, _Ref]:
        """Returns a storage relative to a segment, and as itself."""
        name = self._name(storage)
        itself = ("same", storage)
        if name is None:
            return itself, itself
        if name[:3] == segment.key:
            own = ("own", name[3])
            return own, own
        return ("at", name[0], name[1], name[2] - segment.key[2], name[3]), itself

    def _relative(self, segment: _Segment) -> _Pattern:
        """Returns a segment's recording with pairs of references, see `_refs`."""
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
            return tuple(self._refs(s, segment) for s in storages)

        ops = []
        for i in range(first, last):
            op = tracker.ops[i]
            where = (op.call - call, op.origin - origin) if not is_gap else (0, 0)
            if not is_gap and not (where[0] >= 0 and 0 <= where[1] < forward.ops[1] - forward.ops[0]):
                raise Irregular(path, "an op stems from outside of its call")
            signature = op.signature if not is_gap else self._kind(op.signature)
            ops.append((signature, op.phase, op.replayed, *where, refs(op.inputs), refs(op.outputs)))
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
            (self._refs(s, segment), i - first)
            for i in range(first, last)
            for s in self.deaths.get(i, ())
            if not segment.storages[0] <= s < segment.storages[1]
        ]
        saves = [
            (at - first, of - call if not is_gap else 0, self._refs(s, segment), at - by)
            for at, of, s, by in tracker.saves[slice(*segment.saves)]
        ]
        low, high = (bisect.bisect_left(self.write_ops, i) for i in (first, last))
        writes = [(op - first, self._refs(s, segment)) for op, s in tracker.writes[low:high]]
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
                        inner.input_grad_bytes,
                        inner.output_grad_bytes,
                        inner.chained,
                        inner.refusal,
                    )
                )
        return _Pattern(
            ops=ops,
            births=births,
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

    def _kind(self, signature: int) -> Any:
        """Returns what ops outside of calls have in common from step to step: all but the numbers they are given."""
        found = self.tracker.signatures[signature]
        return found.name, len(found.args), found.flops, found.bytes_moved, found.output_bytes

    def _unify(self, one: _Pattern, other: _Pattern, at: int, other_at: int, path: str) -> _Pattern:
        """Returns the recording that both calls are, each reference the one of its two forms that both share."""
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
        for field in dataclasses.fields(_Pattern):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "deaths":
                a, b = sorted(a, key=_death_order), sorted(b, key=_death_order)
            if field.name == "ops" and len(a) == len(b):
                for i, (x, y) in enumerate(zip(a, b, strict=True)):
                    if x[0] != y[0] and isinstance(x[0], int):
                        stepping = _Stepping(signatures[x[0]], signatures[y[0]], at, other_at - at)
                        if not stepping.is_even():
                            raise Irregular(path, f"{what} run other ops: {stepping.one} {stepping.other}")
                        a[i], b[i] = (stepping, *x[1:]), (stepping, *y[1:])
            fields[field.name] = merge(a, b)
        return _Pattern(**fields)

    # -- the new recording --------------------------------------------------------------------------------------

    def run(self) -> None:
        self._number_calls()
        for storage in range(self.marks[0][0]):  # there before the step
            self.new_storage[storage] = storage
            self.storages.append(self.tracker.storages[storage])
        for segment in self.segments:
            kind, path, index = segment.key
            zone = self._zone(path, index) if kind != "pre" else None
            folds = zone is not None and zone.low <= index < zone.high
            if segment.block is not None and (folds or self._lands(kind, zone, index)):
                pattern = self._pattern(kind, path, index)
                if segment.block.folded:
                    self._copy(segment, pattern)
                    self._check_folded(segment, pattern)
                    self.new_op += [self.begins[segment.key]]
                else:
                    self._check_landing(segment, pattern)
                    self._copy(segment, pattern)
                    begin = self.begins[segment.key]
                    self.new_op += range(begin, begin + segment.ops[1] - segment.ops[0])
                    base = self.bases[segment.key]
                    for n, storage in enumerate(range(*segment.storages)):
                        self.new_storage[storage] = base + n
            elif folds:
                pattern = self._pattern(kind, path, index)
                self._learn_inflows(segment, pattern)
                self._keep(segment)
                self._check_gap(segment, pattern)
            else:
                self._keep(segment)
        self.new_op.append(len(self.ops))
        self._settle_deaths()
        self._settle_saves()
        self._settle_calls()
        self._number_signatures()
        tracker = self.tracker
        tracker.ops, tracker.storages, tracker.writes = self.ops, self.storages, self.writes
        tracker.random_ops, tracker.rederive_links = self.random, self.links
        tracker.num_rederived += self.rederived
        tracker.save_ops = [(at, call) for at, call, _, _ in self.saves]
        self.recorder.calls = self.calls

    def _lands(self, kind: str, zone: Zone | None, index: int) -> bool:
        """Whether a call is among the first that were executed after folded ones."""
        if zone is None:
            return False
        if kind == "F":
            return zone.high <= index < zone.high + zone.period
        return zone.low - zone.period <= index < zone.low

    def _keep(self, segment: _Segment) -> None:
        """Takes a segment over as it is."""
        tracker = self.tracker
        path = segment.key[1]
        begin = self.begins[segment.key] = len(self.ops)
        base = self.bases[segment.key] = len(self.storages)
        for storage in range(*segment.storages):
            if storage not in self.slots:
                self.new_storage[storage] = len(self.storages)
                self.storages.append(tracker.storages[storage])
        self.sizes[segment.key] = len(self.storages) - base
        for i in range(*segment.ops):
            op = tracker.ops[i]
            self.new_op.append(len(self.ops))
            if op.origin >= 0 and tracker.ops[op.origin].signature < 0:
                raise Irregular(path, "an op stems from a folded call and runs outside of it")
            call = self.new_call[op.call] if op.call >= 0 else op.call
            origin = self.new_op[op.origin] if op.origin >= 0 else op.origin
            self.ops.append(
                OpRecord(op.signature, call, origin, op.phase, op.replayed, self._new(op.inputs), self._new(op.outputs))
            )
        shift = begin - segment.ops[0]
        for at, call, storage, by in tracker.saves[slice(*segment.saves)]:
            self.saves.append((at + shift, self.new_call[call] if call >= 0 else call, self._now(storage), by + shift))
        low, high = (bisect.bisect_left(self.write_ops, i) for i in segment.ops)
        self.writes += [(op + shift, self._now(s)) for op, s in tracker.writes[low:high]]
        low, high = (bisect.bisect_left(tracker.random_ops, i) for i in segment.ops)
        self.random += [op + shift for op in tracker.random_ops[low:high]]
        self.links += [
            (op + shift, list(self._new(sources))) for op, sources in tracker.rederive_links[slice(*segment.links)]
        ]

    def _now(self, storage: int) -> int:
        """Returns the new index of a storage."""
        alias = self.aliases.get(storage)
        if alias is not None:
            return alias
        found = self.new_storage.get(storage)
        if found is not None:
            return found
        name = self._name(storage)
        if name is None or not 0 <= name[3] < self.sizes.get(name[:3], 0):
            raise Irregular(self.slots[storage][1] if storage in self.slots else "", f"no one tells what {name} is")
        return self.bases[name[:3]] + name[3]

    def _new(self, storages: Any) -> tuple[int, ...]:
        return tuple([self._now(s) for s in storages])

    def _resolve(self, ref: _Ref, key: _Key) -> int:
        """Returns the storage that a reference means in the segment of the given key."""
        if ref[0] == "same":
            return self._now(ref[1])
        if ref[0] == "own":
            return self.bases[key] + int(ref[1])
        at = ref[1], ref[2], key[2] + ref[3]
        if not 0 <= ref[4] < self.sizes.get(at, 0):
            raise Irregular(key[1], f"call {key[2]} refers to a tensor that is not there")
        return self.bases[at] + int(ref[4])

    def _copy(self, segment: _Segment, pattern: _Pattern) -> None:
        """Puts a call in as the pattern says."""
        kind, path, index = key = segment.key
        begin = self.begins[key] = len(self.ops)
        if segment.block is not None and segment.block.folded:
            self.rederived += pattern.rederived
        call = self.new_call[self._call_of(path, index)]
        origin = self.begins["F", path, index]
        base = self.bases[key] = len(self.storages)
        self.sizes[key] = len(pattern.births)
        for new, (nbytes, category, label, op, dies) in enumerate(pattern.births, base):
            self.storages.append(StorageRecord(nbytes, category, begin + op, new, label))  # type: ignore[arg-type]
            if dies is not None:
                self.dies[new] = begin + dies
        copied = self.copied.get(id(pattern))
        if copied is None:
            copied = self.copied[id(pattern)] = _Copied.of(pattern)
        where = [self._resolve(ref, key) for ref in copied.refs]
        is_forward = kind == "F"
        add = self.ops.append
        for i, (signature, phase, replayed, of, at, inputs, outputs) in enumerate(copied.ops, begin):
            add(
                OpRecord(
                    signature if type(signature) is int else self._signature(signature, index),
                    call + of,
                    i if is_forward else origin + at,
                    phase,
                    replayed,
                    tuple([where[r] for r in inputs]),
                    tuple([where[r] for r in outputs]),
                )
            )
        for ref, i in pattern.deaths:
            self.dies[self._resolve(ref, key)] = begin + i
        for at, of, ref, before in pattern.saves:
            self.saves.append((begin + at, call + of, self._resolve(ref, key), begin + at - before))
        self.writes += [(begin + i, self._resolve(r, key)) for i, r in pattern.writes]
        self.links += [(begin + i, [self._resolve(r, key) for r in refs]) for i, refs in pattern.links]
        self.random += [begin + i for i in pattern.random]

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_folded(self, segment: _Segment, pattern: _Pattern) -> None:
        """Checks that a folded call was given what the pattern reads."""
        kind, path, index = key = segment.key
        block = segment.block
        assert block is not None
        if kind == "F":
            for storage, ref in zip(block.inputs, pattern.inputs, strict=True):
                if storage >= 0 and self._now(storage) != self._resolve(ref, key):
                    raise Irregular(path, f"call {index} is handed another tensor")
            return
        if block.given != pattern.given:
            raise Irregular(path, f"gradients flow into call {index} where they do not into others")
        read = {self._resolve(r, key) for op in pattern.ops for r in op[5]}
        for storage in block.inputs:
            is_known = storage not in self.slots or self._name(storage) is not None
            if is_known and self._now(storage) not in read:
                raise Irregular(path, f"call {index} is handed another gradient")

    def _check_landing(self, segment: _Segment, pattern: _Pattern) -> None:
        """Checks an executed call against the pattern; finds which storages stand for running sums."""
        _, path, index = key = segment.key
        found = self._relative(segment)
        if (
            len(found.ops) != len(pattern.ops)
            or found.births != pattern.births
            or [o[:5] for o in found.ops] != [(self._signature(o[0], index), *o[1:5]) for o in pattern.ops]
            or found.random != pattern.random
            or len(found.saves) != len(pattern.saves)
            or found.given != pattern.given
        ):
            raise Irregular(path, f"call {index} does something else than those executed before folded ones")
        zone = self._zone(path, index)
        assert zone is not None
        for a, b in zip(found.ops, pattern.ops, strict=True):
            for pairs, refs in ((a[5], b[5]), (a[6], b[6])):
                if len(pairs) != len(refs):
                    raise Irregular(path, f"call {index} reads other tensors")
                for (relative, itself), wanted in zip(pairs, refs, strict=True):
                    self._learn_inflow(itself[1] if itself[0] == "same" else -1, wanted, path, index)
                    if wanted in (relative, itself) or (itself[0] == "same" and itself[1] in self.slots):
                        continue
                    is_sum = (
                        relative[0] == wanted[0] == "at"
                        and relative[1:3] == wanted[1:3]
                        and relative[4] == wanted[4]
                        and (relative[3] - wanted[3]) % zone.period == 0
                    )
                    if not is_sum:
                        raise Irregular(path, f"call {index} reads other tensors: {relative} {itself} {wanted}")
                    self.aliases[itself[1]] = self._resolve(wanted, key)

    def _learn_inflows(self, segment: _Segment, pattern: _Pattern) -> None:
        """Finds which of a call's storages the gradients are that its folded backward hands on."""
        _, path, index = segment.key
        for i, wanted in zip(range(*segment.ops), pattern.ops, strict=False):
            for storage, ref in zip(self.tracker.ops[i].inputs, wanted[5], strict=False):
                self._learn_inflow(storage, ref, path, index)

    def _learn_inflow(self, storage: int, ref: _Ref, path: str, index: int) -> None:
        slot = self.slots.get(storage)
        if slot is None or slot[0] != "B" or ref[0] != "at" or slot[1] != ref[2] or ref[1] != "B":
            return
        if slot[2] == index + ref[3]:
            known = self.inflows.setdefault((slot[1], self._class(slot[1], slot[2]), slot[3]), ref[4])
            if known != ref[4]:
                raise Irregular(path, "gradients are handed on in different ways")

    def _check_gap(self, segment: _Segment, pattern: _Pattern) -> None:
        """Checks the ops after a folded call against those after an executed one."""
        _, path, index = key = segment.key
        tracker = self.tracker
        saves = tracker.saves[slice(*segment.saves)]
        first = segment.ops[0]
        num_births = sum(s not in self.slots for s in range(*segment.storages))
        is_same = segment.ops[1] - first == len(pattern.ops) and num_births == len(pattern.births)
        is_same = is_same and len(saves) == len(pattern.saves)
        for i, wanted in zip(range(*segment.ops), pattern.ops, strict=False):
            op = tracker.ops[i]
            is_same = is_same and (self._kind(op.signature), op.phase, op.replayed) == wanted[:3]
            is_same = is_same and self._new(op.inputs) == tuple(self._resolve(r, key) for r in wanted[5])
            is_same = is_same and self._new(op.outputs) == tuple(self._resolve(r, key) for r in wanted[6])
        for (at, _, storage, by), save in zip(saves, pattern.saves, strict=False):
            is_same = is_same and (at - first, at - by) == (save[0], save[3])
            is_same = is_same and self._now(storage) == self._resolve(save[2], key)
        if not is_same:
            raise Irregular(path, f"what is done after call {index} is not what is done after others")

    def _signature(self, found: int | _Stepping, index: int) -> int:
        """Returns the number of an op's signature in the given call."""
        if isinstance(found, int):
            return found
        signatures = self.tracker.signatures
        if not self._signatures:
            self._signatures = {repr(s): i for i, s in enumerate(signatures)}
        wanted = found.step(index)
        known = self._signatures.setdefault(repr(wanted), len(signatures))
        if known == len(signatures):
            signatures.append(wanted)
        return known

    def _number_signatures(self) -> None:
        """Numbers signatures in the order in which they are first seen."""
        order: dict[int, int] = {}
        for op in self.ops:
            op.signature = order.setdefault(op.signature, len(order))
        self.tracker.signatures = [self.tracker.signatures[i] for i in order]

    # -- calls, deaths, saves -----------------------------------------------------------------------------------

    def _call_of(self, path: str, index: int) -> int:
        return self.loops[path].forwards[index].calls[0]

    def _number_calls(self) -> None:
        """Gives calls their new numbers: those inside a folded call come after it."""
        inside: dict[int, tuple[str, int]] = {}
        for path, loop in self.loops.items():
            for block in loop.forwards.values():
                if block.folded:
                    inside[block.calls[0]] = (path, block.index)
        self.new_call: list[int] = []
        self.folded_calls = inside
        at = 0
        for i in range(len(self.recorder.calls)):
            self.new_call.append(at)
            at += 1
            if i in inside:
                at += len(self._pattern("F", *inside[i]).calls)

    def _settle_deaths(self) -> None:
        """Sets when storages die, and when those that were kept were made."""
        tracker = self.tracker
        seen: dict[int, list[int]] = {}  # new storage -> when what stands for it died in the folded run
        for storage, record in enumerate(tracker.storages):
            if storage in self.aliases:
                continue
            if storage in self.slots and self._name(storage) is None:
                continue
            seen.setdefault(self._now(storage), []).append(record.free_op)
        kept = set(map(id, tracker.storages))
        for new, record in enumerate(self.storages):
            observed = seen.get(new, ())
            dies = self.dies.get(new)
            if id(record) in kept:
                record.order = new
                if record.alloc_op >= 0:
                    record.alloc_op = self.new_op[record.alloc_op]
            if dies is None:
                if not observed:
                    if id(record) in kept:
                        raise Irregular("", "nothing tells when a running sum ends")
                    raise Irregular("", f"nothing tells when {record.label} of a folded call ends")
                if any(i >= 0 and tracker.ops[i].signature < 0 for i in observed):
                    raise Irregular("", f"{record.label} ends in a folded call where it does not in others")
                dies = -1 if -1 in observed else max(self.new_op[i] for i in observed)
            elif any(i < 0 or self.new_op[i] > dies for i in observed if i < 0 or tracker.ops[i].signature >= 0):
                raise Irregular("", f"{record.label} outlives the call that should end it")
            record.free_op = dies

    def _settle_saves(self) -> None:
        for record in self.storages:
            if record.category == "saved":
                record.category = "temporary"
            record.saved_op, record.saved_by = -1, []
        for _, call, storage, op in self.saves:
            self.storages[storage].save(op, call)

    def _settle_calls(self) -> None:
        counts: dict[str, int] = {}
        for i, call in enumerate(self.recorder.calls):
            new = len(self.calls)
            call.parent = self.new_call[call.parent] if call.parent >= 0 else -1
            call.children = [self.new_call[c] for c in call.children]
            call.first_op, call.last_op = self.new_op[call.first_op], self.new_op[call.last_op]
            call.inputs, call.outputs = self._new(call.inputs), self._new(call.outputs)
            self.calls.append(call)
            folded = self.folded_calls.get(i)
            if folded is None:
                continue
            path, index = folded
            key: _Key = ("F", path, index)
            for inner in self._pattern(*key).calls:
                made = CallRecord(inner[0], 0, inner[1], new + inner[2], call.first_op + inner[4])
                made.children = [new + c for c in inner[3]]
                made.last_op = call.first_op + inner[5]
                made.inputs, made.outputs = (tuple(self._resolve(r, key) for r in refs) for refs in inner[6:8])
                made.input_grad_bytes, made.output_grad_bytes, made.chained, made.refusal = inner[8:]
                self.calls.append(made)
                if inner[2] == 0:
                    call.children.append(len(self.calls) - 1)
        for call in self.calls:
            call.index = counts.get(call.path, 0)
            counts[call.path] = call.index + 1


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and all(isinstance(ref, tuple) and len(ref) > 1 and ref[0] in ("own", "at", "same") for ref in item)
    )


def _death_order(death: Any) -> Any:
    (relative, _), op = death
    return op, str(relative)
