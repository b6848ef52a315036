"""The bytes that are there while each op of a joint graph runs, in a given order.

A value is there from the op that makes it to the last op that reads it, or to the last before it is made again; held
values are there from forward to their last reader in backward; outputs stay. Where kernels are fused (`fused_reads`),
an elementwise value that only fusible ops read is never stored: its readers read what it is made of. Bytes are those
above what is there before the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from recoup.compiled.joint_step import JointOp, JointStep


def levels_of(
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
        elif overwrites and (over := op.overwritable) and any(v in going and v not in starting for v in over):
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
