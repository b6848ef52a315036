"""One execution of a region: its steps, and the slots that stand for its saved tensors until a replay fills them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import ReplayError
from recoup.runtime import execution_context
from recoup.runtime.execution_context import Original
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.region_step import Member, Step
from recoup.runtime.recompute.replay import Replay
from recoup.runtime.recompute.scope import scope
from recoup.runtime.recompute.spot_check import Kind, read_bytes, storage_of


class Slot:
    """A tensor saved inside a region; filled in when the region is replayed.

    Attributes:
        kind, sample: what the replay's tensor is held against.
        filled: what the replay saved in its place, as `saved_tensor.unpack` takes it, until backward has asked.
    """

    __slots__ = ("__weakref__", "filled", "frame", "kind", "sample")

    def __init__(self, frame: Frame, kind: Kind, sample: bytes) -> None:
        self.frame = frame
        self.kind = kind
        self.sample = sample
        self.filled: Any = None

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; replays the region first if this backward pass has not done so."""
        backward_id = _torch.current_backward_id()
        if self.filled is None or self.frame.filled_in != backward_id or backward_id == -1:
            try:
                self.frame.replay(backward_id)
            except ReplayError as error:
                error.region = error.region or self.frame.path
                raise
        filled, self.filled = self.filled, None
        if filled is None:
            raise ReplayError(
                f"Region `{self.frame.path}`: its second forward did not save the tensor {list(self.kind[0])} again. "
                "Its forward depends on something that changed since; leave the module out of the plan.",
                code="E205",
                region=self.frame.path,
            )
        return saved_tensor.unpack(filled)


class Frame:
    """One execution of a region: its steps, its slots, and its replay.

    Attributes:
        is_chunk: whether its steps are calls of one module, which share the attributes noted at the first call.
        kinds: of saved tensors, by themselves: equal ones are one object, since the garbage collector looks at each.
        originals: saved tensors as the auditor keeps them, by place; none unless `verify` compares whole values.
        filled_in: the backward in which the slots were last filled.
        weights: storages of its modules' parameters, without those that are told by their bytes: see `Bindings`.
        given: storages of its arguments, and None: what lies in them counts as no weight.
    """

    __slots__ = (
        "__weakref__",
        "auditor",
        "counts",
        "derives",
        "derives_by_default",
        "filled_in",
        "given",
        "is_chunk",
        "kinds",
        "last_outputs",
        "originals",
        "path",
        "slots",
        "steps",
        "unwritten",
        "weights",
    )

    def __init__(self, member: Member, *, is_chunk: bool = False) -> None:
        self.is_chunk = is_chunk
        self.path = member.path
        self.auditor = execution_context.auditor()
        self.counts = execution_context.current_counts()
        self.unwritten = member.unwritten
        self.derives = member.derives
        self.derives_by_default = member.derives_by_default
        self.steps: list[Step] = []
        self.slots: list[weakref.ref[Slot]] = []
        self.last_outputs: list[weakref.ref[torch.Tensor]] = []
        self.kinds: dict[Kind, Kind] = {}
        self.originals: dict[int, Original] = {}
        self.filled_in = -1
        self.weights: set[int | None] = set()
        self.given: set[int | None] = {None}

    def facts_of(self, tensor: torch.Tensor) -> tuple[Kind, bytes]:
        """Returns what tells a saved tensor: shape, dtype, the weight that it is or is a view of; sampled bytes.

        The weight, None for any other tensor, is its storage and how the tensor lies in it. No bytes are sampled of
        `nn.Parameter`s and their views: they are known by what they are.
        """
        base = tensor._base
        whole = tensor if base is None else base
        kind, own = type(whole), type(tensor)
        if kind is own is torch.Tensor and not self.weights:
            return (tensor.shape, tensor.dtype, None), read_bytes(tensor)
        storage, weight = storage_of(tensor), None
        is_parameter = kind is nn.Parameter or (kind is not torch.Tensor and isinstance(whole, nn.Parameter))
        if storage not in self.given and (is_parameter or storage in self.weights):
            weight = storage, tensor.stride(), tensor.storage_offset()
        is_known = kind is nn.Parameter or own is nn.Parameter
        return (tensor.shape, tensor.dtype, weight), b"" if is_known else read_bytes(tensor)

    def _pack(self, tensor: torch.Tensor) -> Slot:
        if _torch.function_modes_are_on():
            with _torch.past_function_modes():
                return self._pack(tensor)
        kind, sample = self.facts_of(tensor)
        slot = Slot(self, self.kinds.setdefault(kind, kind), sample)
        if self.auditor is not None and (original := self.auditor.keep(tensor)) is not None:
            self.originals[len(self.slots)] = original
        self.slots.append(weakref.ref(slot))
        return slot

    def previous(self) -> list[torch.Tensor | None]:
        """Returns the outputs of the last call; None for those that were freed."""
        return [ref() for ref in self.last_outputs]

    def run(
        self,
        member: Member,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        previous: list[torch.Tensor | None],
    ) -> Any:
        """Runs a call's first forward without keeping the tensors that it saves."""
        with _torch.past_function_modes():
            step = Step(member, forward, args, kwargs, previous, has_attributes=not (self.is_chunk and self.steps))
        del previous
        self.weights |= step.bindings.storages
        self.given |= step.given
        recorder = current_recorder()
        hooks = _torch.saved_tensors_hooks(self._pack, Slot.unpack)
        scope.depth += 1
        if recorder is not None:
            recorder.paused += 1
        try:
            with hooks, step.kept.noting():
                output = forward(*args, **kwargs)
        finally:
            scope.depth -= 1
            if recorder is not None:
                recorder.paused -= 1
        with _torch.past_function_modes():
            step.settle()
        self.steps.append(step)
        if self.is_chunk:
            self.last_outputs = [weakref.ref(t) for t in iterate_tensors(output)]
        else:
            self.last_outputs = [weakref.ref(output)] if isinstance(output, torch.Tensor) else []
        return output

    def replay(self, backward_id: int) -> None:
        """Replays the region and fills its slots."""
        for step in self.steps:
            step.check(self.path)
        if self.slots:
            execution_context.count("num_replays", self.counts)
            self.filled_in = backward_id
            Replay(self).run()

    def drift(self, what: str, code: str) -> ReplayError:
        """Returns the ReplayError for a replay that did something else than the first forward."""
        return ReplayError(
            f"Region `{self.path}`: its second forward {what}. Something its forward reads changed between forward "
            "and backward (a flag, a hook, a cache, an input changed in place, a removed plan); keep it fixed, "
            f"or leave this module out of the plan with a `save` decision for {self.path!r}.",
            code=code,
        )
