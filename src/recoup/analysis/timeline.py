"""Memory over the step of a priced trace, as reports draw it; no torch, nothing run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from recoup.cost.model import PricedTrace
from recoup.ir.labels import group_labels, without_numbers
from recoup.ir.report import MOST_ROWS, Timeline
from recoup.ir.trace import Storage, Trace
from recoup.thresholds import MOST_NAMES

CATEGORIES = (
    *("parameter", "buffer", "library", "optimizer", "batch", "gradient"),
    *("saved", "kept", "rebuilt", "temporary"),
)
Level = np.ndarray[tuple[int], np.dtype[np.int64]]
"""Bytes during each op, (num_ops,)."""


def category_levels(priced: PricedTrace) -> dict[str, Level]:
    """Returns the bytes alive during each op, by category; hidden workspace counts as temporary."""
    trace = priced.trace
    num_ops = len(trace.ops)
    change = {c: np.zeros(num_ops + 2, dtype=np.int64) for c in CATEGORIES}
    read_again = {i for op in trace.ops[trace.num_forward_ops :] for i in op.inputs}
    for index, storage in enumerate(trace.storages):
        level = change[_shown_category(storage, trace, index in read_again)]
        level[max(storage.alloc_op, 0)] += storage.nbytes
        level[min(storage.free_op, num_ops) + 1] -= storage.nbytes
    levels = {c: np.cumsum(change[c])[:num_ops] for c in CATEGORIES}
    levels["temporary"] = levels["temporary"] + np.asarray(priced.op_workspace_bytes, dtype=np.int64)
    return levels


def _shown_category(storage: Storage, trace: Trace, is_read_again: bool) -> str:
    """Returns the category that reports give a storage.

    What autograd does not hold itself is told apart by when it lives: "kept" was made in forward and is read in
    backward (a region or a plan by tensor keeps it to run ops again from it), "rebuilt" was made by ops that ran again
    and is there after them.
    """
    if storage.category != "temporary" or storage.alloc_op < 0:
        return "buffer" if storage.category == "outside" else storage.category
    if storage.alloc_op < trace.num_forward_ops:
        return "kept" if is_read_again and storage.free_op > trace.num_forward_ops else "temporary"
    ends_in_replay = storage.free_op < len(trace.ops) and trace.ops[storage.free_op].replayed
    return "rebuilt" if trace.ops[storage.alloc_op].replayed and not ends_in_replay else "temporary"


def op_phase(trace: Trace, index: int) -> str:
    """Returns the phase of an op as reports name it: a second run is "replay"."""
    op = trace.ops[index]
    return "replay" if op.replayed else op.phase


def make_timeline(priced: PricedTrace, *, plain: PricedTrace | None = None, fixed_bytes: int = 0) -> Timeline:
    """Returns memory over the step of `priced`.

    Args:
        plain: the plain step, whose optimizer part follows where `priced` was captured without one (no plan changes
            it).
        fixed_bytes: what the device takes whatever the step does; shown as "library".
    """
    levels, seconds, phases = _whole_step(priced, plain)
    levels["library"] = levels["library"] + fixed_bytes
    total = np.sum([levels[c] for c in CATEGORIES], axis=0)
    begins = np.concatenate([[0.0], np.cumsum(seconds)])
    peak = int(total.argmax())
    stops = _columns(begins, peak)
    return Timeline(
        seconds=tuple(float(begins[i]) for i in stops[:-1]),
        duration_seconds=float(begins[-1]),
        series=tuple((c, _at_column_peaks(levels[c], total, stops)) for c in CATEGORIES if levels[c].any()),
        phases=_merge_phases(phases, begins),
        peak_seconds=float(begins[peak]),
        peak_bytes=int(total[peak]),
        phase=phases[peak],
        at_peak=tuple((c, int(levels[c][peak])) for c in CATEGORIES if levels[c][peak]),
        tensors=_tensors(priced, plain),
    )


def find_peak(priced: PricedTrace, plain: PricedTrace | None) -> tuple[PricedTrace, int]:
    """Returns the op at which the step's memory peaks, and the step it is an op of: `plain` in the optimizer's part."""
    levels, _, _ = _whole_step(priced, plain)
    peak = int(np.sum([levels[c] for c in CATEGORIES], axis=0).argmax())
    num_ops = len(priced.trace.ops)
    if peak < num_ops or plain is None:
        return priced, peak
    return plain, peak - num_ops + next(i for i, o in enumerate(plain.trace.ops) if o.phase == "optimizer")


def _whole_step(priced: PricedTrace, plain: PricedTrace | None) -> tuple[dict[str, Level], np.ndarray, list[str]]:  # type: ignore[type-arg]
    """Returns levels, seconds and phase of each op, the optimizer's part taken from `plain` where `priced` has none."""
    trace = priced.trace
    levels = category_levels(priced)
    seconds = np.asarray(priced.op_seconds)
    phases = [op_phase(trace, i) for i in range(len(trace.ops))]
    if plain is not None and "optimizer" not in phases:
        at = [i for i, o in enumerate(plain.trace.ops) if o.phase == "optimizer"]
        if at:
            rest = category_levels(plain)
            levels = {c: np.concatenate([levels[c], rest[c][at]]) for c in CATEGORIES}
            seconds = np.concatenate([seconds, np.asarray(plain.op_seconds)[at]])
            phases += ["optimizer"] * len(at)
    return levels, seconds, phases


def _columns(begins: np.ndarray, peak: int) -> list[int]:  # type: ignore[type-arg]
    """Returns the first op of each column and the end: columns of equal time, and one that begins at the peak."""
    num_ops = len(begins) - 1
    edges = np.linspace(0.0, begins[-1], MOST_ROWS + 1)[:-1]
    first = np.unique(np.searchsorted(begins[:-1], edges, side="left"))
    first = np.unique(np.concatenate([[0], first, [peak]]))
    return [*(int(i) for i in first if i < num_ops), num_ops]


def _at_column_peaks(level: np.ndarray, total: np.ndarray, stops: Sequence[int]) -> tuple[int, ...]:  # type: ignore[type-arg]
    """Returns the level at the moment of each column when the total is largest, so that the stack adds up."""
    return tuple(int(level[a + int(total[a:b].argmax())]) for a, b in itertools.pairwise(stops))


def _merge_phases(phases: Sequence[str], begins: np.ndarray) -> tuple[tuple[str, float, float], ...]:  # type: ignore[type-arg]
    merged: list[tuple[str, float, float]] = []
    for i, phase in enumerate(phases):
        begin, end = float(begins[i]), float(begins[i + 1])
        if merged and merged[-1][0] == phase:
            merged[-1] = (phase, merged[-1][1], end)
        else:
            merged.append((phase, begin, end))
    return tuple(merged)


def _tensors(priced: PricedTrace, plain: PricedTrace | None) -> tuple[tuple[str, int, str], ...]:
    priced, peak = find_peak(priced, plain)
    trace = priced.trace
    there = [s for s in trace.storages if s.alloc_op <= peak <= s.free_op]
    alive = [(s.label, s.nbytes) for s in there]
    lines = {without_numbers(s.label): s.source for s in reversed(there)}
    workspace = priced.op_workspace_bytes[peak]
    if workspace:
        alive.append((f"workspace of {trace.signatures[trace.ops[peak].signature].name}", workspace))
    named = group_labels(alive)[:MOST_NAMES]
    return tuple((what, size, lines.get(what.rpartition(" (x")[0] or what, "")) for what, size in named)
