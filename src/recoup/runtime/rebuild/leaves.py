"""Calls of torch's own small modules under a plan by tensor: recorded whole, their ops run past the dispatch mode.

What `nn.Linear` dispatches follows from the metadata of what it is handed, and no result is saved inside of it. So
where a call is as it was in an earlier step, its one recorded op is known before it runs: the record is a look at the
call's tensors, and the ops (most are views) cost what they cost in plain training. Only modules in whose forward no
code but torch's own runs are taken: they write to nothing, so that nothing recorded goes stale meanwhile. Elsewhere a
version counter would not do: a write through `.data` leaves it as it was, and autograd goes on with what was written.
A call that differs is recorded op by op; a result that is not what it was is unknown, and held by who reads it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime.patch import PatchedForward
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.held_recorder import HeldRecorder
from recoup.runtime.rebuild.lineage import Value
from recoup.runtime.rebuild.marks import Frame
from recoup.runtime.rebuild.sites import Noted
from recoup.thresholds import MOST_TRIES


@dataclasses.dataclass(frozen=True)
class Kind:
    """A class of modules whose forward calls one function of `torch.nn.functional`, which saves only what it reads.

    Attributes:
        forward: the class's own.
        name: of the function.
        function: itself.
        attributes: those that it is handed.
    """

    forward: Any
    name: str
    function: Any
    attributes: Callable[[Any], Any]

    def is_itself(self, kind: type[nn.Module]) -> bool:
        """Whether nobody has put something else in the place of the class's forward or of the function."""
        return kind.forward is self.forward and getattr(F, self.name) is self.function


def _is_torchs(function: Any) -> bool:
    """Whether a function is torch's and no other that was put in its place before this was imported."""
    name: str = getattr(function, "__globals__", {"__name__": "torch.nn."})["__name__"]
    return name.startswith("torch.nn.")


_SMALL = {
    nn.Linear: Kind(nn.Linear.forward, "linear", F.linear, lambda module: None),
    nn.GELU: Kind(nn.GELU.forward, "gelu", F.gelu, operator.attrgetter("approximate")),
    nn.SiLU: Kind(nn.SiLU.forward, "silu", F.silu, operator.attrgetter("inplace")),
}
KINDS: dict[type[nn.Module], Kind] = {
    kind: known for kind, known in _SMALL.items() if _is_torchs(known.forward) and _is_torchs(known.function)
}


class _Leaf:
    """A module's call as it last ran.

    Attributes:
        marks: the plan's in it: none, or one that holds the result.
        made: how its result was made.
        attributes: of the module.
        picks: which of the call's tensors the op reads.
        matches: whether tensors are like those of the call.
        offsets: theirs in their storages.
        gives: whether a result is like the one it gave.
    """

    __slots__ = ("attributes", "gives", "made", "marks", "matches", "offsets", "picks")

    def __init__(
        self,
        made: Noted,
        attributes: Any,
        picks: tuple[int, ...],
        matches: Callable[..., bool],
        offsets: list[int],
        gives: Callable[..., bool],
        frame: Frame,
    ) -> None:
        self.marks = frame.marks
        self.made = (made.site, made.rest, made.kwargs)  # not its values: they are the step's
        self.attributes = attributes
        self.picks = picks
        self.matches = matches
        self.offsets = offsets
        self.gives = gives

    def values(self, recorder: HeldRecorder, tensors: tuple[torch.Tensor, ...]) -> tuple[Value, ...] | None:
        """Returns the values that the op is about to read; None: the call is not as it was."""
        if len(tensors) != len(self.offsets) or not self.matches(*tensors):
            return None
        if [t.storage_offset() for t in tensors] != self.offsets:
            return None
        found = []
        for i in self.picks:
            value = recorder.value_read(tensors[i])
            if value.base is not None and value.base[3] is not tensors[i].dtype:
                return None
            found.append(value)
        return tuple(found)


def op_by_op(recorder: HeldRecorder, path: str, patched: PatchedForward, *args: Any, **kwargs: Any) -> Any:
    """Runs a module's forward, each op of it recorded."""
    recorder.enter(path)
    try:
        return patched.original(*args, **kwargs)
    finally:
        recorder.leave()


def _only_op(recorder: HeldRecorder, out: Any) -> Noted | None:
    """Returns the op that made a result of the innermost call, if nothing else was recorded of that call.

    Nor may the plan say anything of the call but that the result is held.
    """
    frame = recorder.frame
    value = recorder.existing(out) if type(out) is torch.Tensor else None
    made = None if value is None else value.made
    if type(made) is not Noted or not made.site.is_single or len(frame.sites) != frame.place:
        return None
    ordinals = [i for i, site in frame.sites.items() if site is None or site.kinds is not None]
    if len(ordinals) != 1 or frame.sites[ordinals[0]] is not made.site:
        return None
    for ordinal, mark in (frame.marks or {}).items():
        label = op_facts(made.site.overload).label
        held = OpMark(path=mark.path, call=mark.call, ordinal=ordinal, op=label, holds=True)
        if ordinal or frame.ordinal != 1 or mark != held:
            return None
    return made


class Leaves:
    """The calls of a plan's leaves, by module path; all steps share them."""

    def __init__(self) -> None:
        self._known: dict[str, _Leaf] = {}
        self._misses: dict[str, int] = {}

    def run(self, recorder: HeldRecorder, path: str, patched: PatchedForward, kind: Kind, x: Any) -> Any:
        """Runs a module's forward on `x`, and has the recorder know what it did."""
        module = patched.module
        attributes = module.__dict__
        parameters = attributes["_parameters"]
        if (
            self._misses.get(path, 0) >= MOST_TRIES
            or _torch.num_function_modes()
            or _torch.num_dispatch_modes() != 1
            or not kind.is_itself(type(module))
            or not attributes.keys().isdisjoint(parameters)
        ):
            return op_by_op(recorder, path, patched, x)
        tensors = (x, *[p for p in parameters.values() if p is not None])
        leaf = self._known.get(path)
        if (
            leaf is not None
            and leaf.attributes == kind.attributes(module)
            and (values := leaf.values(recorder, tensors)) is not None
            and recorder.begin_past(path, leaf.marks)
        ):
            with _torch.past_dispatch_modes():
                out = patched.original(x)
            if type(out) is torch.Tensor and leaf.gives(out) and not out.storage_offset():
                recorder.note_call(leaf.made, values, out)
                if leaf.marks is not None:
                    recorder.hold(out)
            else:
                self._miss(path)
            return out
        self._miss(path)
        recorder.enter(path)
        try:
            out = patched.original(x)
            made = _only_op(recorder, out)
            if made is not None:
                self._learn(recorder, path, made, kind.attributes(module), tensors, out)
            return out
        finally:
            recorder.leave()

    def _miss(self, path: str) -> None:
        """Notes that a call was not as the one before; after a few such it is not looked at again."""
        self._misses[path] = self._misses.get(path, 0) + 1
        self._known.pop(path, None)

    def _learn(
        self,
        recorder: HeldRecorder,
        path: str,
        made: Noted,
        attributes: Any,
        tensors: tuple[Any, ...],
        out: torch.Tensor,
    ) -> None:
        """Notes a call of which one op was recorded, if that reads only what the call was handed."""
        if type(tensors[0]) is not torch.Tensor or any(type(p) is not nn.Parameter for p in tensors[1:]):
            return
        values = [recorder.value_of(t) for t in tensors]
        if len(set(values)) != len(values) or any(value not in values for value in made.values):
            return
        matches, gives = _torch.tensor_guard(tensors), _torch.tensor_guard((out,))
        if matches is None or gives is None or not matches(*tensors) or not gives(out) or out.storage_offset():
            return
        picks = tuple([values.index(value) for value in made.values])
        offsets = [t.storage_offset() for t in tensors]
        self._known[path] = _Leaf(made, attributes, picks, matches, offsets, gives, recorder.frame)
