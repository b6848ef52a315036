"""Rebuilding by tensor: saved tensors of a segment of the forward are rebuilt together from the results that are held.

[Note: segments]
1. The forward's ops are recorded (`lineage.py`), matmuls and convolutions too: every op that reads tensors and returns
   new ones. A segment is an interval of them.
2. A saved tensor whose history leads to held results is not kept: autograd gets a `Rebuilt`, and its segment
   remembers the sources. What no history leads to (random numbers, opaque kernels, inputs) is held.
3. The first `Rebuilt` of a segment that backward unpacks has all of its segment's rebuilt: each op that is needed runs
   once, in forward order; an intermediate is let go after its last reader, a result after the last who waits for it.
4. A segment may be rebuilt in *pieces*: its first rebuild ends with what they start from, and each piece is rebuilt
   from that when backward gets there. A piece is a segment whose `around` is the one it is a piece of.
5. Nothing of the user's Python runs twice: the very overloads run on the very arguments, below autocast and autograd.

The scheme is that of activation checkpointing (Chen et al., arXiv 1604.06174) with tensors in the place of modules.
"""

from __future__ import annotations

from typing import Any

import torch

from recoup import _torch
from recoup.errors import ReplayError
from recoup.runtime import execution_context
from recoup.runtime.rebuild.kept import Kept, Source, changed_since, is_overwritten, laid
from recoup.runtime.rebuild.lineage import Geometry, Made, Read, Surroundings, Value
from recoup.runtime.rebuild.rederived import constant_contents, fitted, paused
from recoup.runtime.waiting import Ticket, Waiting


class Segment:
    """An interval of the forward's ops.

    Attributes:
        around: the segment that this one is a piece of.
        pending: for each value, those who have still to ask for it: `Rebuilt`s that backward unpacks, and pieces that
            start from it. They hold it once it was rebuilt.
        sources: what keeps the held results that its values are rebuilt from.
        joints: values that are held for its pieces once it was rebuilt. starts: those of `around` that a piece is
            rebuilt from, with what it is served by.
    """

    __slots__ = ("__weakref__", "_reached", "around", "joints", "pending", "sources", "starts")

    def __init__(self, around: Segment | None = None) -> None:
        self.around = around
        self.pending: dict[Value, Waiting] = {}
        self.sources: dict[int, Source] = {}
        self.joints: set[Value] = set()
        self.starts: dict[Value, Ticket] = {}
        self._reached: set[Value] = set()

    def reach(self, value: Value) -> list[Source] | None:
        """Returns the sources that a value is rebuilt from, less those known to the segment; None: it cannot be.

        Walks the record back to what is held; what was walked before is known.
        """
        found: dict[int, Source] = {}
        seen: set[Value] = set()
        around, reached = self.around, self._reached
        stack = [value]
        while stack:
            current = stack.pop()
            if current in seen or current in reached:
                continue
            seen.add(current)
            if current.constant is not None:
                constant, parameter = current.constant, current.constant.tensor
                if constant.copy is None and (parameter._version != constant.version or not has_memory(parameter)):
                    return None
                constant.is_source = True
                continue
            if current.kept is not None and (kept := current.alive()) is not None:
                found[id(kept)] = kept
                continue
            made = current.made
            if made is None:
                return None
            if around is not None and current in around.joints:
                further = around.reach(current)
                if further is None:
                    return None
                found.update((id(source), source) for source in further)
                self.starts[current] = around.pending.setdefault(current, Waiting()).add(self)
                continue
            for read in made.reads:
                stack.append(read.value)
        self._reached |= seen
        self.sources.update(found)
        for source in found.values():
            if isinstance(source, Kept):
                source.is_source = True
        return list(found.values())

    def result(self, value: Value) -> torch.Tensor:
        """Returns the contents of a value, rebuilding all that is pending if it is not there."""
        found: torch.Tensor | None = self.pending[value].result()
        if found is None:
            asked = [v for v, w in self.pending.items() if w and w.result() is None and not v.overwritten]
            with _torch.below_autocast_and_autograd(), execution_context.recomputing(), paused():
                found = self._rebuild({*asked, value})[value]
        return found

    def _started(self) -> dict[Value, torch.Tensor]:
        """Returns what a piece starts from, rebuilding the segment around it if that is not there.

        From here on nobody else holds it: each goes after its last reader.
        """
        around = self.around
        if around is None:
            return {}
        for value in self.starts:  # again, where a second backward asks after they were served
            self.starts[value] = around.pending[value].add(self)
        here = {value: around.result(value) for value in self.starts}
        for value, ticket in self.starts.items():
            around.pending[value].serve(ticket)
        return here

    def _rebuild(self, wanted: set[Value]) -> dict[Value, torch.Tensor]:
        """Runs every op that leads to `wanted` once, in the order of the forward; returns their contents."""
        here = self._started()
        for value, waiting in self.pending.items():
            if (known := waiting.result()) is not None:
                here[value] = known
        ops: dict[int, tuple[Made, list[Value]]] = {}
        uses: dict[Value, int] = {}
        stack, seen = list(wanted), set(wanted)
        while stack:
            value = stack.pop()
            if value in here or value.constant is not None or value.alive() is not None:
                continue
            made = value.made
            if made is None:
                raise changed_since("a tensor that saved tensors are rebuilt from")
            if made.order in ops:
                ops[made.order][1].append(value)
                continue
            ops[made.order] = (made, [value])
            for read in made.reads:
                uses[read.value] = uses.get(read.value, 0) + 1
                if read.value not in seen:
                    seen.add(read.value)
                    stack.append(read.value)
        found = {value: here[value] for value in wanted if value in here}
        for order in sorted(ops):
            made, values = ops[order]
            args = _decoded(made.args, here)
            if made.kwargs:
                out = made.function(*args, **{key: _decoded((item,), here)[0] for key, item in made.kwargs.items()})
            else:
                out = made.function(*args)
            del args
            for value in values:
                assert value.base is not None
                tensor = fitted(out if type(out) is torch.Tensor else _result(out, value.output), value.base)
                here[value] = tensor
                if value in wanted:
                    found[value] = tensor
                del tensor
            del out
            for read in made.reads:
                uses[read.value] -= 1
                if not uses[read.value]:
                    here.pop(read.value, None)
            for value in values:
                if not uses.get(value):
                    here.pop(value, None)
        for value in wanted:
            if value not in found:  # kept by somebody by now
                contents = _contents(value, here)
                found[value] = contents if value.base is None else laid(contents, value.base)
            self.pending[value].hold(found[value])
        return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a parameter has its memory now, and will in the segment's backward (not so under FSDP1 and ZeRO-3)."""
    if _torch.is_sharded_parameter(tensor):
        return False
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def _decoded(items: Any, here: dict[Value, torch.Tensor]) -> list[Any]:
    """Returns an op's recorded arguments with tensors in the place of reads."""
    decoded: list[Any] = []
    for item in items:
        if type(item) is Read:
            value, geometry = item.value, item.geometry
            found = here.get(value)
            if found is None:
                decoded.append(laid(_contents(value, here), geometry))
            else:  # rebuilt, so that it lies as it did
                decoded.append(found if geometry == value.base else laid(found, geometry))
        elif isinstance(item, (list, tuple)):
            decoded.append(_decoded(item, here))
        else:
            decoded.append(item)
    return decoded


def _result(out: Any, position: int) -> torch.Tensor:
    """Returns one of the results of an op."""
    result: torch.Tensor = out[position] if isinstance(out, (tuple, list)) else out
    return result


def _contents(value: Value, here: dict[Value, torch.Tensor]) -> torch.Tensor:
    if value.constant is not None:
        parameter = value.constant.tensor
        if value.constant.copy is None and not has_memory(parameter):
            raise ReplayError(
                f"A parameter {list(parameter.shape)} that saved tensors are rebuilt from was taken away since "
                "its module's forward. Plan without `rebuild`: actions=('rederive', 'recompute').",
                code="E203",
            )
        return constant_contents(value)
    found = here.get(value)
    if found is not None:
        return found
    kept = value.alive()
    if kept is None:
        raise changed_since("a tensor that saved tensors are rebuilt from")
    contents: torch.Tensor = kept.contents().detach()
    return contents


class Rebuilt:
    """What autograd gets instead of a saved tensor: a value of a segment and the geometry it is wanted in."""

    __slots__ = ("__weakref__", "_counts", "_ticket", "_under", "_waiting", "geometry", "segment", "value")

    def __init__(self, value: Value, geometry: Geometry, segment: Segment, under: Surroundings) -> None:
        self._under = under
        self._counts = execution_context.current_counts()
        self.value = value
        self.geometry = geometry
        self.segment = segment
        waiting = segment.pending.get(value)
        if waiting is None:
            waiting = segment.pending[value] = Waiting()
        self._waiting = waiting
        self._ticket = waiting.add(self)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would.

        Under `retain_graph` it may be asked for again, and is rebuilt again.
        """
        if self.value.overwritten and is_overwritten(self.value, self.geometry):
            size, _, _, dtype = self.geometry
            raise changed_since(f"{dtype} {list(size)}")
        tensor = self._waiting.result()
        if tensor is None and self._under.are_here():
            tensor = self.segment.result(self.value)
        elif tensor is None:
            with self._under.again():
                tensor = self.segment.result(self.value)
        self._waiting.serve(self._ticket)
        execution_context.count("num_rederived", self._counts)
        return laid(tensor, self.geometry)
