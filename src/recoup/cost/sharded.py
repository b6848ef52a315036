"""Bytes of a step whose parameters, gradients and optimizer state are sharded over a world, as FSDP2 does it.

Units are the elements of module lists (`model.layers.3`) and the rest, the root. What this counts on each rank:

- parameters, gradients, optimizer state and the optimizer's temporaries: a `world_size`-th, rounded up;
- while a unit runs: its unsharded parameters, and the gathered buffer of the next one (the largest is taken);
- in backward also the unit's unsharded gradients, and the buffer of the reduce-scatter in flight;
- the root's parameters, unsharded from the first op to the end of backward (FSDP2's default for the root).

An estimate, read off FSDP2's default order (`reshard_after_forward=True`, implicit prefetch, one group of ranks); it
does not see the caching allocator's fragmentation, nor padding of parameters that do not divide evenly.
"""

from __future__ import annotations

import dataclasses

from recoup.cost.model import CostModel, PricedTrace
from recoup.errors import UsageError
from recoup.ir.trace import Storage, Trace


def unit_of(path: str) -> str:
    """Returns the FSDP unit that a module or parameter path belongs to: up to its first number; "" is the root."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def num_all_gathers(num_units: int, *, reshard_after_forward: bool = True) -> int:
    """Returns the all-gathers of one forward and backward under FSDP2, with or without regions.

    Args:
        num_units: sharded units, the root included. reshard_after_forward: of the units below the root; the root is
            not resharded after forward, by FSDP2's default.
    """
    return num_units + (num_units - 1 if reshard_after_forward else 0)


class ShardedCost:
    """Prices a trace as another cost model does, with the bytes of one rank out of `world_size`."""

    def __init__(self, cost: CostModel, *, world_size: int) -> None:
        if world_size < 1:
            raise UsageError(f"world_size must be at least 1; got {world_size}.")
        self.cost = cost
        self.world_size = world_size

    def price(self, trace: Trace) -> PricedTrace:
        """Returns the priced trace of one rank."""
        priced = self.cost.price(trace)
        if self.world_size == 1:
            return priced
        extra = self._transient_bytes(trace)
        workspace = tuple(w + e for w, e in zip(priced.op_workspace_bytes, extra, strict=True))
        return dataclasses.replace(
            priced,
            trace=self._shard(trace),
            op_workspace_bytes=workspace,
            source=f"{priced.source}, sharded over {self.world_size}",
        )

    def _shard(self, trace: Trace) -> Trace:
        optimizer_from = next((i for i, op in enumerate(trace.ops) if op.phase == "optimizer"), len(trace.ops))
        # A step captured for a plan is given the optimizer state of the first one, which is sharded already.
        is_first = optimizer_from < len(trace.ops)

        def shard(storage: Storage) -> Storage:
            sharded = storage.category in ("parameter", "gradient")
            sharded |= storage.category == "optimizer" and is_first
            sharded |= storage.alloc_op >= optimizer_from
            if not sharded:
                return storage
            return dataclasses.replace(storage, nbytes=-(-storage.nbytes // self.world_size))

        return dataclasses.replace(trace, storages=tuple(shard(s) for s in trace.storages))

    def _transient_bytes(self, trace: Trace) -> list[int]:
        unit_bytes: dict[str, int] = {}
        for storage in trace.storages:
            if storage.category == "parameter":
                unit = unit_of(storage.label)
                unit_bytes[unit] = unit_bytes.get(unit, 0) + storage.nbytes
        root_bytes = unit_bytes.pop("", 0)
        largest = max(unit_bytes.values(), default=0)
        result = []
        for op in trace.ops:
            if op.phase == "optimizer":
                result.append(0)
                continue
            own = unit_bytes.get(unit_of(trace.calls[op.call].path) if op.call >= 0 else "", 0)
            held = root_bytes + own + largest
            if op.phase == "backward":
                held += (own or root_bytes) + largest  # its gradients, and the buffer of the reduction before it
            result.append(held)
        return result
