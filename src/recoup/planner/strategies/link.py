"""The link to the host that plans with offload are made for: the device's own, from the table, or measured."""

from __future__ import annotations

import functools
import statistics
import time

import torch

from recoup.cost.devices import Device
from recoup.cost.host_link import Link
from recoup.cost.model import CostModel, FlopsCost
from recoup.runtime.offload.transport import make_transport
from recoup.thresholds import ASIDE_ELEMENTS, MOST_TRIES


def find_link(cost: CostModel, *, device: torch.device, dialect: str) -> Link:
    """Returns the link of the device that `cost` is about: its own, from the table, or measured on this machine.

    Args:
        device: of this machine, where nothing in the cost model names one.
        dialect: "cpu" or "cuda".
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
    """Returns the bandwidth of the transport that plans use there, the median of a few copies."""
    transport = make_transport(device, "auto")
    flat = torch.ones(ASIDE_ELEMENTS, dtype=torch.float32, device=device).view(torch.uint8)  # its start does not count
    out, back = [], []
    for _ in range(MOST_TRIES):
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
        del returned, handle
    transport.close()
    where = "pinned host memory" if device.type == "cuda" else "a file in the temporary directory"
    return Link(
        out_bytes=flat.nbytes / statistics.median(out),
        back_bytes=flat.nbytes / statistics.median(back),
        overlaps=device.type == "cuda",
        source=f"measured: {flat.nbytes >> 20} MiB to {where} and back",
    )
