"""A compiled step as plain data, the order its backward runs in, and the bytes that are there at every op.

A joint graph is forward's ops followed by backward's; views are no ops here. Holding a set of forward's values,
backward runs its own ops in their order, and every forward op that one of them needs runs again right before it, once:
the rebuild of a value is as late as it can be, so what lies between two held values is there only while backward is
between them.

A value is there from the op that makes it to the last op that reads it; held values are there from forward to their
last reader in backward; outputs stay. Where kernels are fused (`fused_reads`), an elementwise value that only fusible
ops read is never stored: its readers read what it is made of. Bytes are those above what is there before the step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointOp:
    """One op of a joint graph.

    Attributes:
        inputs, outputs: values. Every value has at most one maker; those without one are inputs of the graph.
        seconds: what running it again takes. can_rerun: whether backward may run it again. is_fusible: whether a
            compiler makes its result inside of the kernel that reads it; reads_fusible: whether its kernel can do that
            with what it reads. is_random: whether it draws random numbers.
        keeps_place: whether it may not be moved past others: it draws numbers, or changes what it is given.
        overwritable: inputs in whose place the result may be written, if nothing reads them afterwards.
        state_bytes: of the generator, kept for an op that draws the same numbers again. workspace_bytes: that its
            kernel has while it runs, beside what it reads and makes. flops: of matrix products and convolutions.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float = 0.0
    can_rerun: bool = True
    is_fusible: bool = False
    reads_fusible: bool = False
    is_random: bool = False
    keeps_place: bool = False
    overwritable: tuple[int, ...] = ()
    state_bytes: int = 0
    workspace_bytes: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointStep:
    """A joint graph.

    Attributes:
        value_bytes: of each value. ops: forward's in order, then backward's. num_forward: how many are forward's.
        results: values that forward returns. gradients: values that backward returns. tangents: values that backward is
            given.
        fused_reads: stored values from which a compiler makes a value again for each of several readers, at most; with
            more it stores the value. 0: kernels are not fused.
    """

    value_bytes: tuple[int, ...]
    ops: tuple[JointOp, ...]
    num_forward: int
    results: frozenset[int]
    gradients: frozenset[int]
    tangents: frozenset[int] = frozenset()
    fused_reads: int = 0

    @functools.cached_property
    def makers(self) -> dict[int, int]:
        """The op that makes each value that an op makes."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    @functools.cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """What each op reads and makes."""
        return tuple(tuple(dict.fromkeys((*op.inputs, *op.outputs))) for op in self.ops)

    @functools.cached_property
    def lean_order(self) -> tuple[int, ...]:
        """Backward's own ops in the graph's order, but two kinds as early as their inputs are there.

        An op that leads to nothing but gradients of parameters: what it reads of forward's is let go before the next
        gradient is made. And an op that reads only what backward made and lets go of more than it makes.
        """
        ops, begin, sizes = self.ops, self.num_forward, self.value_bytes
        behind = range(begin, len(ops))
        if any(ops[at].keeps_place for at in behind):
            return tuple(behind)
        goes_on: set[int] = set()  # ops that lead to other ops than casts of what they make
        own = {at: [v for v in ops[at].inputs if self.makers.get(v, -1) >= begin] for at in behind}
        readers: dict[int, set[int]] = {}
        for at in reversed(behind):
            for value in own[at]:
                readers.setdefault(value, set()).add(at)
            if len(ops[at].inputs) > 1 or at in goes_on:
                goes_on.update(self.makers[v] for v in own[at])
        made: set[int] = set()
        order: list[int] = []

        def comes_now(at: int) -> bool:
            if at in order_set or not own[at] or not made.issuperset(own[at]):
                return False
            if at not in goes_on:
                return True
            if any(0 <= self.makers.get(v, -1) < begin for v in ops[at].inputs):
                return False
            freed = sum(sizes[v] for v in own[at] if v not in self.gradients and readers[v] <= order_set | {at})
            return freed > sum(sizes[v] for v in ops[at].outputs)

        order_set: set[int] = set()
        for first in behind:
            left = [first] if first not in order_set else []
            while left:
                at = left.pop(0)
                if at in order_set:
                    continue
                order.append(at)
                order_set.add(at)
                made.update(ops[at].outputs)
                near = set().union(*[readers.get(v, set()) for v in (*ops[at].outputs, *own[at])])
                left += [n for n in sorted(near) if comes_now(n)]
        return tuple(order)

    @functools.cached_property
    def reads(self) -> dict[int, int]:
        """Forward's values that backward reads, with the first of backward's ops that reads each."""
        made = {v for op in self.ops[: self.num_forward] for v in op.outputs}
        found: dict[int, int] = {}
        for at in range(self.num_forward, len(self.ops)):
            for value in self.ops[at].inputs:
                if value in made:
                    found.setdefault(value, at)
        for value in sorted(self.gradients & made):
            found.setdefault(value, len(self.ops))
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step that holds certain values.

    Attributes:
        held: the values, with those that backward needs and cannot rebuild. dropped: values that each of backward's own
            ops that needs them makes anew. order: backward's ops, ops of forward that
            run again among them. forward_peak_bytes, backward_peak_bytes: above what was there before the step.
        held_bytes: at the end of forward, results left out. held_result_bytes: of results that are held too, there when
            the caller has let go of them. forward_levels, backward_levels: bytes while each op runs.
        seconds: of the ops that run again.
    """

    held: frozenset[int]
    dropped: frozenset[int]
    order: tuple[int, ...]
    forward_levels: tuple[int, ...]
    backward_levels: tuple[int, ...]
    held_bytes: int
    seconds: float
    held_result_bytes: int = 0

    @property
    def forward_peak_bytes(self) -> int:
        """The highest level of forward."""
        return max(self.forward_levels, default=0)

    @property
    def backward_peak_bytes(self) -> int:
        """The highest level of backward."""
        return max(self.backward_levels, default=0)

    @property
    def peak_bytes(self) -> int:
        """The highest level."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


def backward_order(
    step: JointStep, held: frozenset[int], dropped: frozenset[int] = frozenset(), *, as_recorded: bool = False
) -> tuple[frozenset[int], tuple[int, ...]]:
    """Returns what has to be held, and the ops of backward in order with those of forward that run again.

    Args:
        held: what is to be held; values that are needed and cannot be rebuilt are added. dropped: values that each of
            backward's own ops makes anew. as_recorded: leave backward's own ops in the graph's order.
    """
    maker, ops, order, all_held = step.makers, step.ops, list[int](), set(held)
    ready = set(range(len(step.value_bytes))) - maker.keys() | held

    def needed(at: int) -> list[int]:
        """The ops that have to run before op `at`, and it, in order."""
        found, left = {at}, list(ops[at].inputs)
        while left:
            value = left.pop()
            if value in ready or (made_by := maker[value]) in found:
                continue
            if made_by < step.num_forward and not ops[made_by].can_rerun:
                all_held.add(value)
                ready.add(value)
                continue
            found.add(made_by)
            left += ops[made_by].inputs
        return sorted(found)

    for at in range(step.num_forward, len(ops)) if as_recorded else step.lean_order:
        if ready.issuperset(ops[at].inputs):
            order.append(at)
        else:
            run = needed(at)
            for again in run:
                ready.update(ops[again].outputs)
            order += run
            ready -= dropped
        ready.update(ops[at].outputs)
    rerun = {at for at in order if at < step.num_forward}
    # A value that is held and made again all the same (an op with several results) is not held.
    read = step.gradients.union(*[ops[at].inputs for at in order])
    kept = {v for v in all_held if v in read and maker.get(v, len(step.ops)) < step.num_forward}
    return frozenset(v for v in kept if maker[v] not in rerun or v in held), tuple(order)


def timeline(
    step: JointStep, held: frozenset[int], dropped: frozenset[int] = frozenset(), *, as_recorded: bool = False
) -> Timeline:
    """Returns the order and the bytes of a step that holds `held` from forward to backward.

    Args:
        dropped: values that each of backward's own ops makes anew. as_recorded: the step as torch runs it, backward's
            own ops in the graph's order and nothing written over what it reads.
    """
    dropped = frozenset(v for value in dropped for v in step.ops[step.makers[value]].outputs) - held
    all_held, order = backward_order(step, held, dropped, as_recorded=as_recorded)
    forward = list(range(step.num_forward))
    # What nothing reads any more and no one keeps does not run.
    forward_levels = _levels(step, forward, start=(), keeps=step.results | all_held, overwrites=not as_recorded)
    again = [at for at in order if at < step.num_forward]
    kept = {at: step.ops[at].state_bytes for at in again if step.ops[at].state_bytes}  # from its run to the one again
    held_bytes = sum(kept.values()) + sum(step.value_bytes[v] for v in all_held if v not in step.results)
    start = tuple(sorted(all_held | step.tangents))
    backward_levels = _levels(step, order, start=start, keeps=step.gradients, overwrites=not as_recorded)
    if kept:
        made = itertools.accumulate(kept.get(at, 0) for at in forward)
        left = itertools.accumulate((-kept.get(at, 0) for at in order[:-1]), initial=sum(kept.values()))
        forward_levels = list(map(operator.add, forward_levels, made))
        backward_levels = list(map(operator.add, backward_levels, left))
    return Timeline(
        held=all_held,
        dropped=dropped,
        order=order,
        forward_levels=tuple(forward_levels),
        backward_levels=tuple(backward_levels),
        held_bytes=held_bytes,
        held_result_bytes=sum(step.value_bytes[v] for v in all_held & step.results),
        seconds=sum(step.ops[at].seconds for at in again),
    )


def rebuilt_for(step: JointStep, value: int, held: frozenset[int]) -> frozenset[int]:
    """Returns the values that are made on the way to one, it included, where `held` are there."""
    found: set[int] = set()
    left = [value]
    while left:
        at = left.pop()
        if at in found or at in held or at not in step.makers:
            continue
        op = step.ops[step.makers[at]]
        if op.can_rerun and not op.is_random:
            found.update(op.outputs)
            left += op.inputs
    return frozenset(found) - held


def read_at_peak(step: JointStep, made: Timeline) -> set[int]:
    """Returns forward's values that are there while backward's level is the highest, for ops that run then or later."""
    order, levels = made.order, made.backward_levels
    if not levels:
        return set(made.held)
    peak = levels.index(max(levels))
    here = set(made.held)
    for at in order[: peak + 1]:
        here.update(step.ops[at].outputs)
    read: set[int] = set()
    for at in order[peak:]:
        read.update(step.ops[at].inputs)
    return {v for v in here & read if step.makers.get(v, len(step.ops)) < step.num_forward}


def _levels(
    step: JointStep,
    order: Sequence[int],
    *,
    start: tuple[int, ...],
    keeps: frozenset[int] | set[int],
    overwrites: bool,
) -> list[int]:
    """Returns the bytes alive while each op of `order` runs, its results and its inputs included."""
    starting, sizes, ops = set(start), step.value_bytes, step.ops
    inputs = _stored_inputs(step, order, starting, keeps) if step.fused_reads else None
    reads = None if inputs is None else set().union(*inputs)
    gone = _last_uses(step, order, inputs, keeps, starting)
    level = sum(sizes[v] for v in start)
    here = starting.copy()
    levels = []
    for position, at in enumerate(order):
        op, going = ops[at], gone[position]
        reused = 0
        if inputs is not None:
            reused = _reused(step, op, [v for v in going if v in inputs[position]])
        elif overwrites and any(v in going and v in here and v not in starting for v in op.overwritable):
            reused = sizes[op.outputs[0]]
        for value in op.outputs:
            if value in here or (reads is not None and value not in keeps and value not in reads):
                continue  # fused away, or never made
            here.add(value)
            level += sizes[value]
        levels.append(level + op.workspace_bytes - reused)
        for value in going:
            if value in here:
                here.remove(value)
                level -= sizes[value]
    return levels


def _last_uses(
    step: JointStep,
    order: Sequence[int],
    inputs: Sequence[tuple[int, ...]] | None,
    keeps: frozenset[int] | set[int],
    start: set[int],
) -> list[list[int]]:
    """Returns for each op of `order` the values that nothing uses after it, or that are made again before that.

    Args:
        inputs: what each op's kernel reads; None: its own inputs.
    """
    gone: list[list[int]] = []
    used = set(keeps)
    stays = keeps | start
    for position in range(len(order) - 1, -1, -1):
        at = order[position]
        outputs = step.ops[at].outputs
        uses = step.uses[at] if inputs is None else dict.fromkeys((*inputs[position], *outputs))
        going = [v for v in uses if v not in used]
        used.update(going)
        gone.append(going)
        for value in outputs:
            if value not in stays:
                used.discard(value)
    return gone[::-1]


def _reused(step: JointStep, op: JointOp, dying: Sequence[int]) -> int:
    """Returns the bytes of an elementwise kernel's results that take over the memory of inputs not read later."""
    if not op.is_fusible:
        return 0
    free = sorted(step.value_bytes[v] for v in dying)
    reused = 0
    for value in op.outputs:
        if step.value_bytes[value] in free:
            free.remove(step.value_bytes[value])
            reused += step.value_bytes[value]
    return reused


def _stored_inputs(
    step: JointStep, order: Sequence[int], start: set[int], keeps: frozenset[int] | set[int]
) -> list[tuple[int, ...]]:
    """Returns for each op the stored values that its kernel reads; values that are fused away are read through."""
    readers: dict[int, list[int]] = {}
    for at in order:
        for value in step.ops[at].inputs:
            readers.setdefault(value, []).append(at)
    through: dict[int, tuple[int, ...]] = {}
    found = []
    for at in order:
        op = step.ops[at]
        reads = tuple(dict.fromkeys(v for value in op.inputs for v in through.get(value, (value,))))
        found.append(reads)
        if not op.is_fusible:
            continue
        for value in op.outputs:
            if value in keeps or value in start:
                continue
            reading = readers.get(value, ())
            if len(reading) > 1 and len(reads) > step.fused_reads:
                continue
            if all(step.ops[reader].reads_fusible for reader in reading):
                through[value] = reads
    return found
