"""What the planner knows of offload: the link to the host, and the plans that people make by hand."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence

import torch

from recoup.cost.devices import Device
from recoup.cost.host_link import Link
from recoup.cost.model import CostModel, FlopsCost
from recoup.ir.decision import Decision, Region
from recoup.runtime.offload.offloaded_saved_tensor import MIN_BYTES
from recoup.runtime.offload.transport import make_transport
from recoup.solver.offload import Assumption, depths, with_offload
from recoup.solver.problem import Problem

_TRIED_BYTES = 1 << 24
_NUM_TRIES = 3


def find_link(cost: CostModel, *, device: torch.device, dialect: str) -> Link:
    """Returns the link of the device that `cost` is about: its own, from the table, or measured on this machine.

    Args:
        device: of this machine, where nothing in the cost model names one. dialect: "cpu" or "cuda".
    """
    own = getattr(cost, "link", None)
    if isinstance(own, Link):
        return own
    if isinstance(cost, FlopsCost):
        return Link(out_bytes=1e10, back_bytes=1e10, overlaps=dialect == "cuda", source="flops")
    found = getattr(cost, "device", None)
    if found is None:
        found = getattr(getattr(cost, "cost", None), "device", None)  # a sharded cost stands around another
    if isinstance(found, Device):
        source = dict(found.sources)["copy_bytes"]
        overlaps = found.dialect == "cuda"
        return Link(out_bytes=found.copy_bytes, back_bytes=found.copy_bytes, overlaps=overlaps, source=source)
    return measured_link(found if isinstance(found, torch.device) else device)


@functools.cache
def measured_link(device: torch.device) -> Link:
    """Returns what copies through the transport that plans use there reach, by the median of a few."""
    transport = make_transport(device, "auto")
    flat = torch.ones(_TRIED_BYTES, dtype=torch.uint8, device=device)
    out, back = [], []
    for _ in range(_NUM_TRIES):
        began = time.perf_counter()
        handle = transport.put(flat)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        out.append(time.perf_counter() - began)
        began = time.perf_counter()
        returned = transport.get(handle)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        back.append(time.perf_counter() - began)
        del returned
        transport.drop(handle)
    transport.close()
    where = "pinned host memory" if device.type == "cuda" else "a file in the temporary directory"
    return Link(
        out_bytes=_TRIED_BYTES / statistics.median(out),
        back_bytes=_TRIED_BYTES / statistics.median(back),
        overlaps=device.type == "cuda",
        source=f"measured: {_TRIED_BYTES >> 20} MiB to {where} and back",
    )


def problems_with_offload(problem: Problem, link: Link) -> list[Problem]:
    """Returns the problem with offload's labels, once for each assumption on what copies cost that may hold."""
    assumptions: list[tuple[Assumption, int]] = [("exposed", 0)]
    if link.overlaps:
        assumptions = [*(("window", depth) for depth in depths(problem)), ("hidden", 0), ("exposed", 0)]
    return [
        with_offload(
            problem,
            out_seconds=1 / link.out_bytes,
            back_seconds=1 / link.back_bytes,
            overlaps=link.overlaps,
            assumption=assumption,
            min_bytes=MIN_BYTES,
            depth=depth,
        )
        for assumption, depth in assumptions
    ]


def is_offloaded(decisions: Sequence[Decision]) -> bool:
    """Whether something goes to the host."""
    return any(d.offloads for d in decisions)


def with_inputs_offloaded(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Returns the decisions with the inputs of every region moved to the host, as Unsloth does by hand."""
    return tuple(dataclasses.replace(d, offload=True) if isinstance(d, Region) else d for d in decisions)
