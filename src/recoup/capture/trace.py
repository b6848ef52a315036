"""From what the tracker and the call recorder saw to a `Trace`."""

from __future__ import annotations

import bisect

from torch import nn

from recoup.capture.module_calls import CallRecord, CallRecorder
from recoup.capture.records import StorageRecord
from recoup.capture.sums import let_go_before
from recoup.capture.tracker import Tracker
from recoup.ir.labels import method_key, paths_around
from recoup.ir.trace import Call, MethodCall, Op, Storage, Trace


def build_trace(
    *,
    tracker: Tracker,
    recorder: CallRecorder,
    released: Tracker | None,
    model: nn.Module,
    keep: frozenset[str] = frozenset(),
    fingerprint: str,
    device: str,
    loss_source: str,
    reason: str,
    notes: tuple[str, ...] = (),
    optimizer_host_bytes: int = 0,
) -> Trace:
    """Returns the trace.

    Args:
        released: the run in which autograd kept nothing (None: not to be had; then saved storages count as released
            when nothing reads them any more).
        keep: paths of modules that must run once.
        reason: why a real step was run; "" after a fake one.
        notes: sentences for the plan.
        optimizer_host_bytes: of the optimizer's state, on the host but for its step.
    """
    num_ops = len(tracker.ops)
    run_once = {"", *(parent for path in keep for parent in paths_around(path))} if keep else set()
    for record in tracker.storages:
        if record.free_op < 0:
            record.free_op = num_ops
    let_go_before(tracker.ops, tracker.storages)
    _set_released(tracker, released)
    writes_by_storage: dict[int, int] = {}
    for op, storage in tracker.writes:
        if tracker.ops[op].phase in ("forward", "loss"):
            writes_by_storage[storage] = max(op, writes_by_storage.get(storage, -1))
    buffer_names = {i: r.label for i, r in enumerate(tracker.storages) if r.category in ("buffer", "outside")}
    buffer_writes = sorted(write for write in tracker.writes if write[1] in buffer_names)
    parameter_writes = {
        tracker.storages[i].label: op
        for i, op in writes_by_storage.items()
        if tracker.storages[i].category == "parameter"
    }
    return Trace(
        source="real" if reason else "fake",
        reason=reason,
        notes=notes,
        draws_on_host=tracker.draws_on_host,
        precisions=tuple(recorder.precisions),
        num_saved=sum(
            call >= 0 or any(c.first_op <= at <= c.last_op for c in recorder.method_calls)
            for at, call in tracker.save_ops
        ),
        method_calls=tuple(
            MethodCall(
                path=c.method[0],
                method=c.method[1],
                first_op=c.first_op,
                last_op=c.last_op,
                input_numel=c.input_numel,
                num_calls_before=c.num_calls_before,
            )
            for c in recorder.method_calls
        ),
        optimizer_host_bytes=optimizer_host_bytes,
        device=device,
        fingerprint=fingerprint,
        model_class=type(model).__name__,
        num_parameters=sum(p.numel() for p in model.parameters()),
        grad_mode_default_loss=loss_source,
        signatures=tuple(tracker.signatures),
        ops=tuple(
            Op(
                signature=o.signature,
                call=o.call,
                origin=o.origin,
                phase=o.phase,
                replayed=o.replayed,
                inputs=o.inputs,
                outputs=o.outputs,
                begins_call=o.begins_call,
            )
            for o in tracker.ops
        ),
        storages=tuple(
            Storage(
                nbytes=r.nbytes,
                category=r.category,
                alloc_op=r.alloc_op,
                free_op=r.free_op,
                released_op=r.released_op,
                saved_ops=tuple(r.saved_ops),
                saved_by=tuple(r.saved_by),
                label=_label(r, tracker, recorder),
                source=_source(r, tracker),
            )
            for r in tracker.storages
        ),
        rederive_links=tuple((op, tuple(sources)) for op, sources in tracker.rederive_links),
        num_rederived=tracker.num_rederived,
        copies=tuple(tracker.copies),
        calls=tuple(
            _call(
                call,
                tracker,
                stop,
                writes_by_storage,
                parameter_writes,
                buffer_writes,
                buffer_names,
                runs_once=call.path in run_once,
            )
            for call, stop in zip(recorder.calls, _replay_stops(tracker, recorder.calls), strict=True)
        ),
    )


def _replay_stops(tracker: Tracker, calls: list[CallRecord]) -> list[int]:
    """Returns for each call how many of the step's ops have run when the last thing is saved inside it, -1: nothing."""
    stops = [-1] * len(calls)
    for stop, call in tracker.save_ops:
        if call >= 0:
            stops[call] = stop
    for index in range(len(calls) - 1, -1, -1):  # children come after their parents
        parent = calls[index].parent
        if parent >= 0:
            stops[parent] = max(stops[parent], stops[index])
    return stops


def _call(
    call: CallRecord,
    tracker: Tracker,
    stop: int,
    writes: dict[int, int],
    parameter_writes: dict[str, int],
    buffer_writes: list[tuple[int, int]],
    buffer_names: dict[int, str],
    *,
    runs_once: bool,
) -> Call:
    prefix = f"{call.path}." if call.path else ""
    refusal = call.refusal
    if not refusal and any(writes.get(i, -1) >= call.first_op for i in call.inputs):
        refusal = "its input is changed in place later in the step"
    written = [n for n, op in parameter_writes.items() if n.startswith(prefix) and op >= call.first_op]
    if not refusal and written:  # through `.data` no version tells
        refusal = f"its parameter `{written[0].removeprefix(prefix)}` is written in the step's own forward"
    low, high = (bisect.bisect_left(buffer_writes, (op, -1)) for op in (call.first_op, call.last_op))
    buffers = tuple(
        dict.fromkeys(
            buffer_names[storage] for _, storage in buffer_writes[low:high] if buffer_names[storage].startswith(prefix)
        )
    )
    return Call(
        path=call.path,
        index=call.index,
        kind=call.kind,
        parent=call.parent,
        children=tuple(call.children),
        first_op=call.first_op,
        last_op=call.last_op,
        inputs=call.inputs,
        outputs=call.outputs,
        input_numel=call.input_numel,
        input_grad_bytes=call.input_grad_bytes,
        output_grad_bytes=call.output_grad_bytes,
        replay_stop_op=stop,
        refusal=refusal,
        mutated_buffers=buffers,
        draws_random=bisect.bisect_left(tracker.random_ops, call.first_op)
        < bisect.bisect_left(tracker.random_ops, call.last_op),
        chained=call.chained,
        runs_once=runs_once,
    )


def runs_alike(tracker: Tracker, again: Tracker) -> bool:
    """Whether a second forward ran as many ops as the first."""
    return len(again.ops) == _num_forward(tracker)


def _num_forward(tracker: Tracker) -> int:
    return sum(1 for o in tracker.ops if o.phase in ("forward", "loss"))


def _set_released(tracker: Tracker, released: Tracker | None) -> None:
    """Fills in when each storage would be let go if autograd kept nothing.

    The second run makes the same storages in the same order, as long as it runs the same ops. Where it does not, what
    autograd keeps is taken to be let go when nothing reads it any more.
    """
    records = tracker.storages
    forward = _num_forward(tracker)
    for record in records:
        record.released_op = record.free_op
    if released is not None and len(released.ops) == forward:
        plain_new = [r for r in records if 0 <= r.alloc_op < forward]
        other_new = [r for r in released.storages if r.alloc_op >= 0]
        if [(r.alloc_op, r.nbytes) for r in plain_new] == [(r.alloc_op, r.nbytes) for r in other_new]:
            for record, other in zip(plain_new, other_new, strict=True):
                if other.free_op >= 0:
                    record.released_op = min(other.free_op, record.free_op)
            return
    last_read = {s: i for i, op in enumerate(tracker.ops[:forward]) for s in (*op.outputs, *op.inputs)}
    for index, record in enumerate(records):
        if record.saved_by and record.alloc_op >= 0:
            record.released_op = min(record.free_op, last_read.get(index, record.alloc_op))


def _source(record: StorageRecord, tracker: Tracker) -> str:
    """Returns the line that made a storage; in backward, the line of the forward op whose node made it."""
    if record.source or record.alloc_op < 0:
        return record.source
    origin = tracker.ops[record.alloc_op].origin
    made = tracker.ops[origin].outputs if origin >= 0 else ()
    return next((tracker.storages[i].source for i in made if tracker.storages[i].source), "")


def _label(record: StorageRecord, tracker: Tracker, recorder: CallRecorder) -> str:
    if record.alloc_op < 0 or record.category == "gradient":
        return record.label
    op = tracker.ops[record.alloc_op]
    if op.call >= 0:
        where = recorder.calls[op.call].path or "(model)"
    else:
        around = (c for c in recorder.method_calls if c.first_op <= record.alloc_op < c.last_op)
        method = next(around, None) if op.phase == "forward" else None
        where = op.phase if method is None else method_key(*method.method)
    return f"{record.label.removeprefix('aten::')} in {where}"
