"""Which leaves rederive from each other's tensors: they act together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from recoup.cost.model import PricedTrace
from recoup.ir.decision import Ambient
from recoup.ir.trace import Trace
from recoup.solver.disjoint_sets import DisjointSets
from recoup.solver.intervals import forward_ops, segments_of


def rederivable(variants: Mapping[Ambient, PricedTrace]) -> set[int]:
    """Returns storages that are saved in the plain step and need not be when everything is rederived.

    The same forward ops make the same storages in the same order in both.
    """
    if "rederive" not in variants:
        return set()
    plain, other = variants["save"].trace, variants["rederive"].trace
    own, others = forward_ops(plain), forward_ops(other)
    if len(own) != len(others):
        return set()
    twin_op = dict(zip(others, own, strict=True))
    kept: dict[tuple[int, int], list[bool]] = {}
    for storage in other.storages:
        if storage.alloc_op in twin_op:
            kept.setdefault((twin_op[storage.alloc_op], storage.nbytes), []).append(storage.saved_op >= 0)
    free = set()
    for index, storage in enumerate(plain.storages):
        found = kept.get((storage.alloc_op, storage.nbytes))
        if found and not found.pop(0) and storage.saved_op >= 0:
            free.add(index)
    return free


def rederive_groups(trace: Trace) -> dict[int, int]:
    """Returns segment -> group for segments that rederive from what other segments keep (union-find over links)."""
    segments = segments_of(trace)
    starts = [s.first for s in segments]
    sets = DisjointSets(len(segments))

    def at(op: int) -> int:
        return int(np.searchsorted(starts, min(op, segments[-1].last - 1), side="right")) - 1

    linked: set[int] = set()
    for op, sources in trace.rederive_links:
        here = at(op)
        for source in sources:
            saved_op = trace.storages[source].saved_op
            there = at(saved_op) if saved_op >= 0 else here
            if there != here:
                linked.update((here, there))
                sets.join(here, there)
    return {segment: sets.find(segment) for segment in linked}


def input_holders(trace: Trace) -> dict[int, list[int]]:
    """Returns for each storage the calls that take it as an input and save it inside, in call order."""
    holders: dict[int, list[int]] = {}
    for index, call in enumerate(trace.calls):
        for storage in call.inputs:
            if trace.storages[storage].saved_op >= 0:
                holders.setdefault(storage, []).append(index)
    return holders
