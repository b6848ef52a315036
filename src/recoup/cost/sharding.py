"""Bytes of a step whose parameters, gradients and optimizer state are sharded over a world, as FSDP2 does it.

Units are the elements of module lists (`model.layers.3`) and the rest, the root. What this counts on each rank, read
off `torch.distributed.fsdp._fully_shard` (torch 2.13) with its defaults (`reshard_after_forward=True`, implicit
prefetch, one group of ranks, one reduce-scatter buffer):

- parameters, gradients, optimizer state and the optimizer's temporaries: a `world_size`-th, rounded up;
- the root's parameters, whole from the first op to the end of backward, and its gradients, whole until then;
- in a unit's forward its whole parameters, and as much again: the buffer they were gathered in, which stays until the
  next unit's came or forward ends;
- in a unit's backward its whole parameters and gradients, the buffer in which the next one is being gathered (at entry
  its own), and the buffer of the reduce-scatter of the one before.

It does not see the caching allocator's fragmentation, padding of parameters that do not divide evenly, mixed-precision
policies, and (but for gloo's copies) what a collective allocates by itself. Gloo copies what it sends; a thread of its
own lets go of the copy, which on a busy machine may be long after the call returned. There are two such threads: what
they hold too long is at most the copy of the newest collective, and copy and input (or result) of one older.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

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
        num_units: sharded units, the root included.
        reshard_after_forward: of the units below the root; the root is not resharded after forward, by FSDP2's default.
    """
    return num_units + (num_units - 1 if reshard_after_forward else 0)


class ShardedCost(CostModel):
    """Prices a trace as another cost model does, with the bytes of one rank out of `world_size`."""

    def __init__(self, cost: CostModel, *, world_size: int, copies: Literal["none", "prompt", "late"] = "none") -> None:
        """Takes the cost model of one device.

        Args:
            copies: whether a collective takes its result's size once more. "none": NCCL. "prompt": gloo, gone when the
                call returns, as nearly always. "late": gloo at its worst, an upper bound: three units' bytes more.
        """
        if world_size < 1:
            raise UsageError(f"world_size must be at least 1; got {world_size}.")
        self.cost = cost
        self.world_size = world_size
        self.copies = copies

    def rest(self) -> None:
        """Gives back what one rank's ops are priced in."""
        self.cost.rest()

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
            num_all_gathers=num_all_gathers(len(_Units(trace).nbytes) + 1),
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

        host_bytes = trace.optimizer_host_bytes
        if is_first:
            host_bytes = -(-host_bytes // self.world_size)
        return dataclasses.replace(
            trace, storages=tuple(shard(s) for s in trace.storages), optimizer_host_bytes=host_bytes
        )

    def _transient_bytes(self, trace: Trace) -> list[int]:
        """Returns for each op the bytes of whole parameters, whole gradients and buffers beside the rank's shards."""
        units = _Units(trace)
        gradients = _whole_gradients(trace, units, self.world_size)
        copies = 0 if self.copies == "none" else 1
        late = 3 * max([*units.nbytes, units.root_nbytes]) if self.copies == "late" else 0
        result = []
        before = (-1, len(units.nbytes))
        ahead: set[int] = set()  # units that a span's replay reached into: whole from there to their own backward
        for i, op in enumerate(trace.ops):
            unit, entered, running = units.of_op[i], units.last_entered[i], units.running[i]
            is_entry = (entered, running) != before
            before = entered, running
            if op.phase == "optimizer":
                result.append(late)
            elif op.phase == "backward":
                gathered = units.size(running - 1)
                held = units.size(running) + units.size(running + 1)
                held += max(gathered * (1 + (copies if is_entry else 0)), units.size(running) if is_entry else 0)
                if op.replayed and 0 <= unit < running:
                    ahead.add(unit)
                ahead = {other for other in ahead if other < running}
                held += sum(map(units.size, ahead))
                result.append(units.root_nbytes + held + gradients[i] + late)
            else:
                held = units.size(unit) + (units.size(entered) if op.phase == "forward" else 0)
                if is_entry:  # the buffer of the one before is still there
                    held = max(held, units.size(entered - 1) + units.size(entered) * (1 + copies))
                result.append(units.root_nbytes + held + late)
        return result


class _Units:
    """The sharded units in forward order, and the unit of each op.

    Attributes:
        nbytes: whole parameters of each.
        root_nbytes: of the rest.
        of_op: the unit of each op's call, -1 for the root.
        last_entered: the last unit whose forward had begun.
        running: in backward, the unit whose backward runs, or the one before while the root's ops run: after the last
            unit, -1.
    """

    def __init__(self, trace: Trace) -> None:
        found: dict[str, int] = {}
        for op in trace.ops:
            name = unit_of(trace.calls[op.call].path) if op.call >= 0 else ""
            if name and op.phase == "forward":
                found.setdefault(name, len(found))
        self.nbytes = [0] * len(found)
        self.root_nbytes = 0
        self.of_label: dict[str, int] = found
        for storage in trace.storages:
            if storage.category == "parameter":
                unit = found.get(unit_of(storage.label), -1)
                if unit >= 0:
                    self.nbytes[unit] += storage.nbytes
                else:
                    self.root_nbytes += storage.nbytes
        self.of_op = [found.get(unit_of(trace.calls[op.call].path), -1) if op.call >= 0 else -1 for op in trace.ops]
        self.last_op = [-1] * len(found)  # of each unit's backward
        entered, self.last_entered = -1, []
        for i, op in enumerate(trace.ops):
            unit = self.of_op[i]
            if op.phase == "forward" and unit >= 0:
                entered = unit
            self.last_entered.append(entered)
            if op.phase == "backward" and unit >= 0 and not op.replayed:
                self.last_op[unit] = i
        self.running = self._running(trace)

    def size(self, unit: int) -> int:
        """Returns the bytes of a unit's whole parameters, 0 if there is no such unit."""
        return self.nbytes[unit] if 0 <= unit < len(self.nbytes) else 0

    def _running(self, trace: Trace) -> list[int]:
        running = len(self.nbytes)  # none yet: the root's own backward
        result = []
        for i, op in enumerate(trace.ops):
            while op.phase == "backward" and self._begins(running, i) and self._is_over(running, i):
                running -= 1
            if op.phase == "backward" and running == 0 and self._is_over(0, i):
                running = -1
            result.append(running)
        return result

    def _is_over(self, unit: int, op: int) -> bool:
        return unit >= len(self.nbytes) or op > self.last_op[unit]

    def _begins(self, running: int, op: int) -> bool:
        """Whether the op is of a unit below the running one: its backward has begun."""
        return 0 <= self.of_op[op] < running


def _whole_gradients(trace: Trace, units: _Units, world_size: int) -> list[int]:
    """Returns for each op the bytes of unsharded gradients: from when they are made until they are reduced."""
    end = max((i for i, op in enumerate(trace.ops) if op.phase == "backward"), default=-1)
    change = [0] * (len(trace.ops) + 1)
    for storage in trace.storages:
        if storage.category == "gradient":
            unit = units.of_label.get(unit_of(storage.label.removeprefix("gradient of ")), -1)
            until = units.last_op[unit] if unit >= 0 else end
            above = storage.nbytes - -(-storage.nbytes // world_size)
            if storage.alloc_op <= until:
                change[max(storage.alloc_op, 0)] += above
                change[until + 1] -= above
    return list(itertools.accumulate(change[:-1]))
