"""Expands the marks that `fold.py` left: each is replaced by the ops that executed calls of the loop ran there.

1. The last two executed calls before the folded ones must have the same relative recording (`patterns.py`).
2. The first calls executed after the folded ones must equal that recording, and so must the ops between folded calls.
3. Gradients of tensors that all calls share are running sums that pass from call to call. In the first call executed
   after folded ones (in backward) these sums have other storages, so that call is rewritten from the recording too,
   once it was found equal to it.
"""

from __future__ import annotations

import bisect
from typing import Any

from recoup.capture.folding.fold import Folding
from recoup.capture.folding.patterns import Copied, Key, Pattern, Ref, Segment, Stepping
from recoup.capture.folding.recording import Recording
from recoup.capture.folding.zones import Irregular, Zone
from recoup.capture.module_calls import CallRecord
from recoup.capture.records import OpRecord, StorageRecord


def unfold(folding: Folding) -> None:
    """Turns the tracker's and the recorder's lists into those of a full capture.

    Raises:
        Irregular: if executed calls differ from each other; the lists are left as they were.
    """
    if folding.failed:
        raise Irregular("", folding.failed)
    if any(b.folded for loop in folding.loops.values() for b in loop.forwards.values()):
        _Unfolder(folding).run()


class _Unfolder(Recording):
    def __init__(self, folding: Folding) -> None:
        super().__init__(folding)
        self.ops: list[OpRecord] = []
        self.storages: list[StorageRecord] = []
        self.calls: list[CallRecord] = []
        self.new_op: list[int] = []
        self.new_storage: dict[int, int] = {}
        self.bases: dict[Key, int] = {}  # the new index of a segment's first storage
        self.sizes: dict[Key, int] = {}
        self.copied: dict[int, Copied] = {}
        self.begins: dict[Key, int] = {}
        self.dies: dict[int, int] = {}
        self.aliases: dict[int, int] = {}
        self.saves: list[tuple[int, int, int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.links: list[tuple[int, list[int]]] = []
        self.random: list[int] = []
        self.rederived = 0

    # -- the new recording --------------------------------------------------------------------------------------

    def run(self) -> None:
        self._number_calls()
        for storage in range(self.marks[0][0]):  # there before the step
            self.new_storage[storage] = storage
            self.storages.append(self.tracker.storages[storage])
        for segment in self.segments:
            kind, path, index = segment.key
            zone = self.zone_of(path, index) if kind != "pre" else None
            folds = zone is not None and zone.low <= index < zone.high
            if segment.block is not None and (folds or self._lands(kind, zone, index)):
                pattern = self.pattern_of(kind, path, index)
                if segment.block.folded:
                    self._check_folded(segment, pattern, self._copy(segment, pattern))
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
                pattern = self.pattern_of(kind, path, index)
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

    def _keep(self, segment: Segment) -> None:
        """Copies a segment unchanged."""
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
            self.ops.append(op.like(call, origin, self._new(op.inputs), self._new(op.outputs)))
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
        name = self.name_of(storage)
        if name is None or not 0 <= name[3] < self.sizes.get(name[:3], 0):
            raise Irregular(self.slots[storage][1] if storage in self.slots else "", f"no one tells what {name} is")
        return self.bases[name[:3]] + name[3]

    def _new(self, storages: Any) -> tuple[int, ...]:
        return tuple([self._now(s) for s in storages])

    def _resolve(self, ref: Ref, key: Key) -> int:
        """Returns the storage that a reference means in the segment of the given key."""
        if ref[0] == "same":
            return self._now(ref[1])
        if ref[0] == "own":
            return self.bases[key] + int(ref[1])
        at = ref[1], ref[2], key[2] + ref[3]
        if not 0 <= ref[4] < self.sizes.get(at, 0):
            raise Irregular(key[1], f"call {key[2]} refers to a tensor that is not there")
        return self.bases[at] + int(ref[4])

    def _copy(self, segment: Segment, pattern: Pattern) -> list[int]:
        """Writes a call's ops by its pattern; returns the storages of the references."""
        kind, path, index = key = segment.key
        begin = self.begins[key] = len(self.ops)
        if segment.block is not None and segment.block.folded:
            self.rederived += pattern.rederived
        call = self.new_call[self._call_of(path, index)]
        origin = self.begins["F", path, index]
        base = self.bases[key] = len(self.storages)
        self.sizes[key] = len(pattern.births)
        for new, (nbytes, category, label, op, dies) in enumerate(pattern.births, base):
            # A pattern has the category as plain text, copied from a record.
            self.storages.append(StorageRecord(nbytes, category, begin + op, new, label))  # type: ignore[arg-type]
            if dies is not None:
                self.dies[new] = begin + dies
        copied = self.copied.get(id(pattern))
        if copied is None:
            copied = self.copied[id(pattern)] = Copied.of(pattern)
        where = [self._resolve(ref, key) for ref in copied.refs]
        is_forward = kind == "F"
        add = self.ops.append
        for i, (signature, phase, replayed, of, at, inputs, outputs, *rest) in enumerate(copied.ops, begin):
            add(
                OpRecord(
                    signature if type(signature) is int else self._signature(signature, index),
                    call + of,
                    i if is_forward else origin + at,
                    phase,
                    replayed,
                    tuple([where[r] for r in inputs]),
                    tuple([where[r] for r in outputs]),
                    *rest,
                )
            )
        for ref, i in copied.deaths:
            self.dies[where[ref]] = begin + i
        self.saves += [(begin + at, call + of, where[r], begin + at - before) for at, of, r, before in copied.saves]
        self.writes += [(begin + i, where[r]) for i, r in copied.writes]
        self.links += [(begin + i, [where[r] for r in refs]) for i, refs in copied.links]
        self.random += [begin + i for i in pattern.random]
        return where

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_folded(self, segment: Segment, pattern: Pattern, where: list[int]) -> None:
        """Checks that the inputs of a folded call are the storages that the pattern reads."""
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
        read = {where[r] for r in self.copied[id(pattern)].read}
        for storage in block.inputs:
            is_known = storage not in self.slots or self.name_of(storage) is not None
            if is_known and self._now(storage) not in read:
                raise Irregular(path, f"call {index} is handed another gradient")

    def _check_landing(self, segment: Segment, pattern: Pattern) -> None:
        """Checks an executed call against the pattern; finds which storages stand for running sums."""
        _, path, index = key = segment.key
        found = self.relative(segment)
        if (
            len(found.ops) != len(pattern.ops)
            or found.births != pattern.births
            or [o[:5] for o in found.ops] != [(self._signature(o[0], index), *o[1:5]) for o in pattern.ops]
            or found.random != pattern.random
            or len(found.saves) != len(pattern.saves)
            or found.given != pattern.given
        ):
            raise Irregular(path, f"call {index} does something else than those executed before folded ones")
        zone = self.zone_of(path, index)
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

    def _learn_inflows(self, segment: Segment, pattern: Pattern) -> None:
        """Finds which of a call's storages are the gradients that its folded backward returns."""
        _, path, index = segment.key
        for i, wanted in zip(range(*segment.ops), pattern.ops, strict=False):
            for storage, ref in zip(self.tracker.ops[i].inputs, wanted[5], strict=False):
                self._learn_inflow(storage, ref, path, index)

    def _learn_inflow(self, storage: int, ref: Ref, path: str, index: int) -> None:
        slot = self.slots.get(storage)
        if slot is None or slot[0] != "B" or ref[0] != "at" or slot[1] != ref[2] or ref[1] != "B":
            return
        if slot[2] == index + ref[3]:
            known = self.inflows.setdefault((slot[1], self.class_of(slot[1], slot[2]), slot[3]), ref[4])
            if known != ref[4]:
                raise Irregular(path, "gradients are handed on in different ways")

    def _check_gap(self, segment: Segment, pattern: Pattern) -> None:
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
            is_same = is_same and (self.kind_of(op.signature), op.phase, op.replayed) == wanted[:3]
            is_same = is_same and self._new(op.inputs) == tuple(self._resolve(r, key) for r in wanted[5])
            is_same = is_same and self._new(op.outputs) == tuple(self._resolve(r, key) for r in wanted[6])
        for (at, _, storage, by), save in zip(saves, pattern.saves, strict=False):
            is_same = is_same and (at - first, at - by) == (save[0], save[3])
            is_same = is_same and self._now(storage) == self._resolve(save[2], key)
        if not is_same:
            raise Irregular(path, f"what is done after call {index} is not what is done after others")

    def _signature(self, found: int | Stepping, index: int) -> int:
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
                at += len(self.pattern_of("F", *inside[i]).calls)
        self.new_call.append(at)

    def _settle_deaths(self) -> None:
        """Sets the ops at which storages are freed, and at which kept ones are allocated."""
        tracker = self.tracker
        seen: dict[int, list[int]] = {}  # new storage -> when what stands for it died in the folded run
        for storage, record in enumerate(tracker.storages):
            if storage in self.aliases:
                continue
            if storage in self.slots and self.name_of(storage) is None:
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
            record.saved_ops, record.saved_by = [], []
        for _, call, storage, op in self.saves:
            self.storages[storage].save(op, call)

    def _settle_calls(self) -> None:
        counts: dict[str, int] = {}
        for around in self.recorder.method_calls:
            around.renumber(self.new_op, self.new_call)
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
            key: Key = ("F", *folded)
            for inner in self.pattern_of(*key).calls:
                made = CallRecord(inner[0], 0, inner[1], new + inner[2], call.first_op + inner[4])
                made.children = [new + c for c in inner[3]]
                made.last_op = call.first_op + inner[5]
                made.inputs, made.outputs = (tuple(self._resolve(r, key) for r in refs) for refs in inner[6:8])
                made.input_numel, made.input_grad_bytes, made.output_grad_bytes, made.chained, made.refusal = inner[8:]
                self.calls.append(made)
                if inner[2] == 0:
                    call.children.append(len(self.calls) - 1)
        for call in self.calls:
            call.index = counts.get(call.path, 0)
            counts[call.path] = call.index + 1
