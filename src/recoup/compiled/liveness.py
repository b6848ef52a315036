"""The bytes that are there while each op of a joint graph runs, in a given order.

A value is there from the op that makes it to the last op that reads it, or to the last before it is made again; held
values are there from forward to their last reader in backward; outputs stay. Where kernels are fused (`fused_reads`),
an elementwise value that only fusible ops read is never stored: its readers read what it is made of. Bytes are those
above what is there before the step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from recoup.compiled.joint_step import JointOp, JointStep


def forward_levels(step: JointStep, keeps: frozenset[int]) -> list[int]:
    """Returns `levels_of` forward's ops in their order, which only what is kept changes."""
    if step.fused_reads:
        return levels_of(step, range(step.num_forward), start=(), keeps=keeps, overwrites=True)
    sizes, last = step.value_bytes, step.last_in_forward
    change = list(step.changes_in_forward)
    for value in keeps & last.keys():
        change[last[value] + 1] += sizes[value]
    levels = list(map(operator.add, itertools.accumulate(change[:-1]), step.workspace_bytes))
    for at, dying in step.over_dying.items():
        if not keeps.issuperset(dying):
            levels[at] -= sizes[step.outputs[at][0]]
    return levels


def levels_of(
    step: JointStep,
    order: Sequence[int],
    *,
    start: tuple[int, ...],
    keeps: frozenset[int] | set[int],
    overwrites: bool,
) -> list[int]:
    """Returns the bytes alive while each op of `order` runs, its results and its inputs included."""
    starting, sizes, outputs = set(start), step.value_bytes, step.outputs
    if step.fused_reads:
        inputs = _stored_inputs(step, order, starting, keeps)
        stored = keeps.union(*inputs)  # what else is made is fused away, or nobody's
    else:
        inputs = [step.inputs[at] for at in order]
    stays, here = keeps | starting, set(start)
    # A value goes after its last use; where it is made again before that, it went after the last one before.
    change, last = [0] * (len(order) + 1), dict[int, int]()
    gone: list[tuple[int, int]] = []
    for position, at in enumerate(order):
        for value in inputs[position]:
            last[value] = position
        for value in outputs[at]:
            if value not in here:
                if step.fused_reads and value not in stored:
                    continue
                here.add(value)
                change[position] += sizes[value]
            elif value not in stays:
                gone.append((last[value], value))
                change[position] += sizes[value]
            last[value] = position
    gone += [(position, value) for value, position in last.items() if value in here and value not in keeps]
    for position, value in gone:
        change[position + 1] -= sizes[value]
    change[0] += sum(sizes[v] for v in start)
    workspace = step.workspace_bytes
    levels = list(map(operator.add, itertools.accumulate(change[:-1]), [workspace[at] for at in order]))
    if step.fused_reads:
        dying: dict[int, list[int]] = {}
        for position, value in gone:
            if value in inputs[position]:
                dying.setdefault(position, []).append(value)
        for position, values in dying.items():
            levels[position] -= _reused(step, step.ops[order[position]], values)
    elif overwrites:
        over, some = step.writes_over, step.written_over - starting
        for position in {p for p, v in gone if v in some and v in over.get(order[p], ())}:
            levels[position] -= sizes[outputs[order[position]][0]]
    return levels


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
