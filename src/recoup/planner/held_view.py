"""Plans by tensor for a captured step: which results are held, where segments end.

Reads values off the trace: a value is what one op wrote into one storage; a view is its storage's value, an op in
place makes a new one. `solver/segments.py` chooses; the applied plan simulated decides.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from recoup.cost.flops import product_flops
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Entry, OpMark, Rebuild
from recoup.ir.trace import Signature, TensorSpec, Trace
from recoup.planner.op_addresses import addresses_of, entries_of, facts_of, planned_entries
from recoup.runtime.rebuild import dropout
from recoup.runtime.rebuild.cheap_ops import DETACH, HOLD
from recoup.runtime.rebuild.saved_tensor import MIN_BYTES
from recoup.solver.build import measure
from recoup.solver.held import Op
from recoup.solver.held_problem import HeldProblem
from recoup.solver.intervals import Interval
from recoup.solver.segments import MOST_PLACES, Choice
from recoup.solver.waists import waists


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldView:
    """A step as the solver of plans by tensor sees it, and how its ops are addressed.

    Attributes:
        parts: for the last value of a storage that a call writes part by part, the earlier ones that autograd saves
            parts of. Where it is held, those stay: they lie over the same bytes.
        flop_seconds: what a FLOP of a product counts beside its time: a share of the step's FLOPs counts like the same
            share of its seconds, as `Incumbents.select` has it.
    """

    problem: HeldProblem
    flop_seconds: float
    addresses: tuple[OpMark | None, ...]
    num_saved: int
    entries: tuple[Entry, ...]
    maker: dict[int, int]
    parts: dict[int, tuple[int, ...]]

    def decide(self, choice: Choice) -> Rebuild:
        """Returns a choice as marks; neighbours that both save are one segment."""
        marks: dict[int, dict[str, Any]] = {}
        saves = False
        for first, label in choice.segments:
            if not (saves and label.held is None):
                saves = label.held is None
                marks.setdefault(first, {}).update(begins_segment=True, saves=saves)
            # What its first op saves is saved before it begins: where it saves, the segment before is to hold that.
            for value in self._saved_by(first) if label.held is None else label.held:
                if value not in self.problem.ops[self.maker[value]].draws:  # which are held anyway
                    marks.setdefault(self.maker[value], {})["holds"] = True
                for part in self.parts.get(value, ()):
                    marks.setdefault(self.maker[part], {})["stays"] = True
            for begin, joints in label.pieces:
                marks.setdefault(begin, {})["begins_piece"] = True
                for value in joints:
                    if value in self.problem.ops[self.maker[value]].draws:
                        continue
                    marks.setdefault(self.maker[value], {})["is_joint"] = True
        found: dict[OpMark, dict[str, Any]] = {}
        for at, says in sorted(marks.items()):
            address = self.addresses[at]
            if address is None:  # what has no number is run again; what begins there, begins with the next that has one
                says = {key: value for key, value in says.items() if key not in ("holds", "stays", "is_joint")}
                address = next((a for a in self.addresses[at:] if a is not None), None)
            if address is not None and says:
                found[address] = found.get(address, {}) | says
        marked = tuple(dataclasses.replace(address, **says) for address, says in found.items())
        return Rebuild(path="", marks=marked, num_saved=self.num_saved, entries=self.entries)

    def _saved_by(self, at: int) -> list[int]:
        """Returns the values that autograd saves for an op and other ops made."""
        return [v for v in self.problem.saves[at] if self.maker.get(v, at) < at]


def held_view(
    priced: PricedTrace,
    *,
    kept_paths: frozenset[str] = frozenset(),
    rerun_seconds: Mapping[int, float] | None = None,
    mask_seconds: Mapping[int, float] | None = None,
    in_loops: bool = False,
    flop_seconds: float | None = None,
) -> HeldView | None:
    """Returns the plain step as a problem of held values, None if the model runs no ops.

    Args:
        kept_paths: modules whose ops are not to run again.
        rerun_seconds: by signature, of ops that run again as another one, which reads all but their largest result.
        mask_seconds: of random masks, made bytes and masks again, by signature of what draws them.
        in_loops: segments may end at each step of a loop that collects results (`waists.py`).
        flop_seconds: see `HeldView`; None: those of this step.
    """
    trace = priced.trace
    num_forward = trace.num_forward_ops
    entries = planned_entries(trace)
    if not entries:
        return None
    of_model = {at for call in entries for at in range(call.first_op, call.last_op)}
    num_ops = entries[-1].last_op
    positions = range(num_ops)  # with what the step runs besides: noise, a forward without gradients
    overheads = priced.serial_costs.rerun_op_seconds
    value_of: dict[int, int] = {}
    versions: dict[int, list[tuple[int, int]]] = {}
    value_bytes: list[int] = []

    released: list[int] = []

    def new_value(storage: int, at: int, *, is_mask: bool) -> int:
        nbytes = trace.storages[storage].nbytes
        if is_mask:  # zeros and ones, held as bytes
            nbytes //= _item_bytes(trace.signatures[trace.ops[at].signature])
        value_bytes.append(nbytes)
        released.append(trace.storages[storage].released_op)
        value_of[storage] = len(value_bytes) - 1
        versions.setdefault(storage, []).append((at, value_of[storage]))
        return value_of[storage]

    products = product_flops(trace.signatures)
    flop_seconds = flop_seconds_of(priced) if flop_seconds is None else flop_seconds
    ops = []
    maker: dict[int, int] = {}
    copied: dict[int, float] = {}  # seconds of a mask's copies, for who reads it to run again
    dear: set[int] = set()  # what `recoup.hold` marks
    for at in positions:
        op = trace.ops[at]
        signature = trace.signatures[op.signature]
        facts = facts_of(signature.name)
        inputs = tuple(value_of[s] for s in op.inputs if s in value_of)
        fresh = [s for s in op.outputs if trace.storages[s].alloc_op == at]
        # `unsafe_split` is no view by its schema, and writes nothing.
        writes = facts is None or facts.written or facts.written_names
        written = dict.fromkeys(s for s in op.outputs if s in op.inputs) if writes and not signature.is_view else ()
        writes_known = bool(written) and all(maker.get(value_of.get(s, -1), -1) in of_model for s in written)
        if signature.name == HOLD:
            dear.update(inputs)
        is_mask = facts is not None and facts.is_random_mask
        outputs = tuple(new_value(s, at, is_mask=is_mask) for s in (*fresh, *written))
        if is_mask and mask_seconds is not None:
            copied.update(dict.fromkeys(outputs, mask_seconds.get(op.signature, 0.0)))
        draws: tuple[int, ...] = ()
        if facts is not None and facts.is_dropout and len(fresh) == 2 and _draws_again(trace, signature):
            draws = (min(outputs, key=value_bytes.__getitem__),)
        again = None if rerun_seconds is None else rerun_seconds.get(op.signature)
        if again is not None:
            draws = tuple(v for v in outputs if value_bytes[v] < max(value_bytes[o] for o in outputs))
        maker.update(dict.fromkeys(outputs, at))
        can_rerun = (
            facts is not None
            and at in of_model
            and (op.call < 0 or trace.calls[op.call].path not in kept_paths)
            and (
                facts.can_rerun
                or facts.runs_again(signature.args)
                or bool(draws)
                or (facts.can_rewrite and writes_known)
            )
        )
        seconds = (
            (priced.op_seconds[at] if again is None else again)
            + (0.0 if signature.is_view else overheads)
            + flop_seconds * products[op.signature]
            + math.fsum(copied.get(v, 0.0) for v in inputs)
        )
        if not inputs and all(value_bytes[v] < MIN_BYTES for v in outputs):
            seconds = 0.0  # of parameters alone, as autocast's cast of a bias: inside of a call that cannot be held
        ops.append(
            Op(
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=outputs,
                seconds=seconds,
                can_rerun=can_rerun,
                draws=draws if can_rerun else (),
            )
        )
    saves: list[list[int]] = [[] for _ in positions]
    self_saved: set[int] = set()
    parts: dict[int, tuple[int, ...]] = {}
    calls = list(itertools.accumulate(op.begins_call for op in trace.ops[:num_ops]))
    num_rebuilt = collections.Counter[int]()  # if they are not held
    after_bytes = 0
    for index, storage in enumerate(trace.storages):
        if storage.alloc_op < 0 or storage.free_op < num_forward:  # the latter: backward never gets to who saved it
            continue
        takers = [op for op in storage.saved_ops if op != storage.alloc_op]  # the op that made it finds what those keep
        known = versions.get(index, [])
        # It is packed before that op runs, unless it is the op's own result.
        saved = {
            at: found[-1]
            for at in {min(op, num_forward - 1) for op in takers or storage.saved_ops}
            if at < num_ops and (found := [v for made, v in known if made < at or made == storage.alloc_op])
        }
        if len(set(saved.values())) > 1 and saved[max(saved)] == known[-1][1]:
            # Parts that a call writes in turn, as the gates of a cell: they are there as long as the storage is.
            *earlier, (last_made, last) = [(made, v) for made, v in known if v in saved.values()]
            if all(calls[at] == calls[last_made] for at in (earlier[0][0], max(saved))):
                parts[last] = tuple(v for _, v in earlier)
                num_rebuilt[last] += len(saved) - 1
                saved = {max(saved): last}
        for at, value in saved.items():
            saves[at].append(value)
            num_rebuilt[value] += 1
            if takers and storage.alloc_op in storage.saved_ops and len(known) == 1:
                self_saved.add(value)
            if storage.nbytes < MIN_BYTES:  # too small to be rebuilt: it stays where autograd saves it
                value_bytes[value] = 0
    # What is saved between two entries stays as it is.
    dear.update(v for at, values in enumerate(saves) if at not in of_model for v in values)
    if dear:
        ops = [op._replace(can_rerun=op.can_rerun and dear.isdisjoint(op.outputs)) for op in ops]
    # A saved tensor that is not held takes its time on top of the op that makes it again.
    each = priced.serial_costs.packed_tensor_seconds + priced.serial_costs.followed_tensor_seconds
    handles = [sum(num_rebuilt[v] for v in op.outputs if value_bytes[v]) for op in ops]
    ops = [op._replace(seconds=op.seconds + each * num) for op, num in zip(ops, handles, strict=True)]
    crossing_sizes = [b or 1 for b in value_bytes]
    addresses = tuple(addresses_of(trace, entries))
    begins = frozenset(p for p in of_model if _may_begin(trace, p))
    places = [0, *waists(_by_storage(ops, versions.values()), crossing_sizes, in_loops=in_loops, allowed=begins)]
    places = _thinned(places, ops, value_bytes)
    for place in places:  # what begins with an op without a number, begins with the next that has one
        begun = next((at for at in range(place, num_ops) if addresses[at] is not None), place)
        early = [v for v in saves[begun] if maker.get(v, -1) < place]
        if begun != place and early:
            saves[place] += early
            saves[begun] = [v for v in saves[begun] if v not in early]
    intervals = [
        Interval(call=0, first=first, last=last) for first, last in zip(places, [*places[1:], num_ops], strict=True)
    ]
    if num_forward > num_ops:
        intervals.append(Interval(call=-1, first=num_ops, last=num_forward))
    numbers = measure(priced, intervals)
    num = len(places)
    if num_forward > num_ops:
        after_bytes = int(max(numbers.backward[num], numbers.forward[num]))
    problem = HeldProblem(
        ops=tuple(ops),
        value_bytes=tuple(value_bytes),
        released=tuple(released),
        saves=tuple(map(tuple, saves)),
        self_saved=frozenset(self_saved),
        unseen=_unseen(calls, ops, {v for values in saves for v in values}),
        bare_bytes=_bare_bytes(priced, num_ops),
        places=tuple(places),
        saved_bytes=tuple(int(b) for b in numbers.saved[:num]),
        forward_bytes=tuple(int(b) for b in numbers.forward[:num]),
        backward_bytes=tuple(int(b) for b in numbers.backward[:num]),
        gradient_bytes=tuple(int(b) for b in numbers.gradient_after[:num]),
        fixed_bytes=numbers.fixed_bytes,
        entering_bytes=_entering_bytes(trace, [*places, num_ops]),
        after_bytes=after_bytes,
    )
    return HeldView(
        problem=problem,
        flop_seconds=flop_seconds,
        addresses=addresses,
        num_saved=trace.num_saved,
        entries=entries_of(entries),
        maker=maker,
        parts=parts,
    )


def flop_seconds_of(priced: PricedTrace) -> float:
    """Returns a step's seconds over its FLOPs of products."""
    products = product_flops(priced.trace.signatures)
    return sum(priced.op_seconds) / max(1, sum(products[op.signature] for op in priced.trace.ops))


def _by_storage(ops: Sequence[Op], versions: Iterable[Sequence[tuple[int, int]]]) -> list[Op]:
    """Returns ops that read and make storages, each named by its first value: what writes in place makes none."""
    first_of = {value: found[0][1] for found in versions for _, value in found}
    by_storage = []
    for op in ops:
        made = tuple(v for v in op.outputs if first_of[v] == v)
        read = dict.fromkeys(first_of[v] for v in (*op.inputs, *op.outputs))
        by_storage.append(op._replace(inputs=tuple(v for v in read if v not in made), outputs=made))
    return by_storage


def _may_begin(trace: Trace, place: int) -> bool:
    """Whether something may begin with an op: with the first of a call of a torch function."""
    op = trace.ops[place]
    return op.begins_call and trace.signatures[op.signature].name != DETACH


def _unseen(calls: Sequence[int], ops: Sequence[Op], saved: Collection[int]) -> frozenset[int]:
    """Returns the values that are read in the call that makes them alone, and that autograd does not save.

    Nobody sees them in a step that follows a program.
    """
    last_read = {v: calls[i] for i, op in enumerate(ops) for v in op.inputs}
    return frozenset(
        v
        for i, op in enumerate(ops)
        for v in op.outputs
        if op.can_rerun and v not in saved and v not in op.draws and last_read.get(v) == calls[i]
    )


def _bare_bytes(priced: PricedTrace, num_ops: int) -> tuple[int, ...]:
    """Returns for each op of the model's forward the bytes alive if autograd kept nothing, above what always is."""
    change = [0] * (num_ops + 1)
    for storage in priced.trace.storages:
        if 0 <= storage.alloc_op < num_ops:
            # What is too small to be rebuilt stays where autograd saves it.
            last = storage.free_op if storage.nbytes < MIN_BYTES else storage.released_op
            change[storage.alloc_op] += storage.nbytes
            change[min(last + 1, num_ops)] -= storage.nbytes
    alive = itertools.accumulate(change[:num_ops])
    return tuple(a + w for a, w in zip(alive, priced.op_workspace_bytes, strict=False))


def _entering_bytes(trace: Trace, places: list[int]) -> tuple[int, ...]:
    """Returns for each interval of the forward the bytes that backward has made so far when it gets there."""
    num_ops, num_forward = len(trace.ops), trace.num_forward_ops
    begins = [num_ops] * (len(places) - 1)
    for i in range(num_ops - 1, num_forward - 1, -1):
        origin = trace.ops[i].origin if trace.ops[i].phase == "backward" else -1
        if 0 <= origin < places[-1]:
            begins[bisect.bisect_right(places, origin) - 1] = i
    change = [0] * (num_ops + 2)
    for storage in trace.storages:
        if storage.alloc_op >= num_forward and storage.category != "gradient" and storage.free_op > storage.alloc_op:
            change[storage.alloc_op + 1] += storage.nbytes
            change[min(storage.free_op, num_ops) + 1] -= storage.nbytes
    made = list(itertools.accumulate(change))
    return tuple(made[i] for i in begins)


def _item_bytes(signature: Signature) -> int:
    """Returns the bytes of one element of an op's first argument."""
    first = next((a for a in signature.args if isinstance(a, TensorSpec)), None)
    return 1 if first is None else getattr(torch, first.dtype.removeprefix("torch.")).itemsize


def _draws_again(trace: Trace, signature: Signature) -> bool:
    """Whether a dropout's result follows from its input and its mask."""
    first, *rest = signature.args
    if not isinstance(first, TensorSpec):
        return False
    device_type = trace.device if trace.device == "cpu" else "cuda"
    return dropout.scale_of(getattr(torch, first.dtype.removeprefix("torch.")), device_type, rest) is not None


def _thinned(places: list[int], ops: list[Op], value_bytes: list[int]) -> list[int]:
    """Returns at most so many places, about as many bytes made between each two."""
    if len(places) <= MOST_PLACES:
        return places
    made, total = [], 0
    for op in ops:
        made.append(total)
        total += sum(value_bytes[v] for v in op.outputs)
    kept, wanted = [0], total / MOST_PLACES
    for place in places[1:]:
        if made[place] - made[kept[-1]] >= wanted:
            kept.append(place)
    return kept
