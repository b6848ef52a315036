"""One execution of a region: the slots that stand for its saved tensors, and the replay that fills them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from recoup import _torch
from recoup._allocation import is_allocation_failure
from recoup._pytree import iterate_tensors
from recoup.errors import ReplayError
from recoup.runtime import execution_context
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.lineage import Recorder, current_recorder
from recoup.runtime.recompute.bindings import storage_of
from recoup.runtime.recompute.region_step import Member, Step
from recoup.runtime.recompute.scope import scope
from recoup.runtime.recompute.spot_check import matches, sample
from recoup.runtime.recompute.uninitialised import saves_unwritten


class _Stop(BaseException):
    """Ends a replay whose last slot is filled. A BaseException: a model's `except Exception` must not catch it."""


class Slot:
    """A tensor saved inside a region; filled in when the region is replayed."""

    __slots__ = ("__weakref__", "backward_id", "dtype", "filled", "frame", "original", "sample", "shape", "weight")

    def __init__(self, frame: Frame, tensor: torch.Tensor) -> None:
        self.frame = frame
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.weight = frame.weight_of(tensor)
        self.sample = sample(tensor)
        self.original = execution_context.original(tensor)  # None unless `verify` compares whole values
        self.filled: Any = None
        self.backward_id = -1

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; replays the region first if this backward pass has not done so."""
        backward_id = _torch.current_backward_id()
        if self.filled is None or self.backward_id != backward_id or backward_id == -1:
            try:
                self.frame.replay(backward_id)
            except ReplayError as error:
                error.region = error.region or self.frame.path
                raise
        filled, self.filled = self.filled, None
        if filled is None:
            raise ReplayError(
                f"Region `{self.frame.path}`: its second forward did not save the tensor {list(self.shape)} again. "
                "Its forward depends on something that changed since; leave the module out of the plan.",
                code="E205",
                region=self.frame.path,
            )
        return saved_tensor.unpack(filled)


class Frame:
    """One execution of a region: its steps, its slots, and its replay.

    Attributes:
        is_chunk: whether its steps are calls of one module, which share the attributes noted at the first call.
    """

    def __init__(self, member: Member, *, is_chunk: bool = False) -> None:
        self.is_chunk = is_chunk
        self.path = member.path
        self.counts = execution_context.current_counts()
        self.unwritten = member.unwritten
        self.derives = member.derives
        self.derives_by_default = member.derives_by_default
        self.steps: list[Step] = []
        self.slots: list[weakref.ref[Slot]] = []
        self.last_outputs: list[weakref.ref[torch.Tensor]] = []
        self.weights: set[int | None] = set()
        self.given: set[int | None] = {None}

    def weight_of(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Returns the weight that a saved tensor is or is a view of, and its layout; None for any other tensor."""
        storage = storage_of(tensor)
        if storage in self.given:
            return None
        if storage not in self.weights:
            base = tensor._base
            base = tensor if base is None else base
            if type(base) is torch.Tensor or not isinstance(base, torch.nn.Parameter):
                return None
        return storage, tensor.stride(), tensor.storage_offset()

    def _pack(self, tensor: torch.Tensor) -> Slot:
        if _torch.num_function_modes():
            with _torch.past_function_modes():
                slot = Slot(self, tensor)
        else:
            slot = Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def previous(self) -> list[torch.Tensor | None]:
        """Returns the outputs of the last call; None for those that were freed."""
        return [ref() for ref in self.last_outputs]

    def run(self, member: Member, args: Any, kwargs: Any, previous: list[torch.Tensor | None]) -> Any:
        """Runs a call's first forward without keeping the tensors that it saves."""
        with _torch.past_function_modes():
            step = Step(member, args, kwargs, previous, has_attributes=not (self.is_chunk and self.steps))
        del previous
        self.weights |= step.bindings.storages
        self.given |= step.given
        recorder = current_recorder()
        hooks = _torch.saved_tensors_hooks(self._pack, _unpack)
        scope.depth += 1
        if recorder is not None:
            recorder.paused += 1
        try:
            with hooks, step.kept.noting():
                output = member.forward(*args, **kwargs)
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
        if not self.slots:
            return
        execution_context.count("num_replays", self.counts)
        filled, is_full = 0, False
        failure: ReplayError | None = None
        differs: list[tuple[int, int, torch.Tensor]] = []  # position, number of the node that saves it, tensor
        roots: list[Any] = []

        def fill(tensor: torch.Tensor) -> Any:
            if not _torch.num_function_modes():
                return fill_in(tensor)
            with _torch.past_function_modes():
                return fill_in(tensor)

        def fill_in(tensor: torch.Tensor) -> Any:
            nonlocal filled, is_full, failure
            if is_full:
                raise _Stop  # again: an `except:` of the model's has eaten the first one
            failure = failure or self._mismatch(filled, tensor)
            if failure is not None:
                raise failure
            position, slot = filled, self.slots[filled]()
            filled += 1
            if slot is not None:
                if slot.original is not None:
                    slot.original.compare(tensor, self.path)
                elif position not in self.unwritten and not matches(slot.sample, tensor):
                    differs.append((position, _torch.next_node_number() - 1, tensor))
                slot.filled = saved_tensor.pack(tensor.detach())
                slot.backward_id = backward_id
            if filled == len(self.slots) and not differs:  # else the graph tells what it means, when it is whole
                is_full = True
                raise _Stop
            return _gone

        with (
            execution_context.recomputing(),
            execution_context.counting_to(self.counts),
            scope.replaying(),
            torch.enable_grad(),
            self._recording(),
            _torch.saved_tensors_hooks(fill, _gone_unpack),
        ):
            try:
                with self.steps[0].attributes_again() if self.is_chunk else _nothing:
                    previous: list[torch.Tensor] = []
                    for step in self.steps:
                        args, kwargs = step.inputs.rebuild(previous)
                        output = step.run_again(args, kwargs, with_attributes=not self.is_chunk)
                        roots += [t.grad_fn for t in iterate_tensors(output)] if differs else []
                        previous = list(iterate_tensors(output)) if self.is_chunk else [output]
                        del args, kwargs, output
            except _Stop:
                return
            except Exception as error:  # user code runs here: whatever it raises gets the region's path
                if not is_full and failure is None:
                    self._explain(error, step)
        if failure is not None:
            raise failure
        for position, number, tensor in differs:
            if not saves_unwritten(roots, number, tensor):
                raise self._drift(f"saved other values in {tensor.dtype} {list(tensor.shape)}", "E206")
            self.unwritten.add(position)
        if filled < len(self.slots):  # once they are full, TorchScript or an `except:` may make what it likes of _Stop
            raise self._drift(f"saved {filled} tensors where the first one saved {len(self.slots)}", "E205")

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a replay: with rederive inside, or saving everything."""
        if self.derives:
            recorder = Recorder()
            recorder.deriving = self.derives_by_default
            return recorder
        return _nothing if current_recorder() is None else _no_recorder()

    def _mismatch(self, position: int, tensor: torch.Tensor) -> ReplayError | None:
        """Returns the error for a tensor that differs from the one first saved there; None if it is the same."""
        if position == len(self.slots):
            return self._drift("saved more tensors than the first one", "E205")
        slot = self.slots[position]()
        if slot is None:
            return None
        if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
            first = f"{slot.dtype} {list(slot.shape)}"
            return self._drift(f"saved {tensor.dtype} {list(tensor.shape)} where the first one saved {first}", "E205")
        found = self.weight_of(tensor)
        if found == slot.weight or (None not in (found, slot.weight) and _moves(tensor)):
            return None
        kinds = ["an activation" if w is None else "a weight" for w in (found, slot.weight)]
        return self._drift(f"saved {kinds[0]} where the first one saved {kinds[1]}, or another one", "E205")

    def _explain(self, error: Exception, step: Step) -> NoReturn:
        """Raises a ReplayError for an exception of a replay's forward, with the region's path."""
        if isinstance(error, ReplayError):
            raise error
        if is_allocation_failure(error):
            error.add_note(f"while region `{self.path}` ran its forward a second time")
            raise error
        if "a leaf Variable that requires grad is being used in an in-place" in str(error):
            raise step.inputs.refusal("one of its arguments") from error
        raise self._drift(f"failed: {type(error).__name__}: {error}", "E207") from error

    def _drift(self, what: str, code: str) -> ReplayError:
        return ReplayError(
            f"Region `{self.path}`: its second forward {what}. Something its forward reads changed between forward "
            "and backward (a flag, a hook, a cache, an input changed in place); keep it fixed, or leave this module "
            f"out of the plan with a `save` decision for {self.path!r}.",
            code=code,
        )


def _moves(weight: torch.Tensor) -> bool:
    """Whether ZeRO-3 gathers a weight, or its base, into other memory each time."""
    return hasattr(weight, "ds_id") or hasattr(weight._base, "ds_id")


def _unpack(slot: Slot) -> torch.Tensor:
    return slot.unpack()


_gone = object()
_nothing = contextlib.nullcontext()


def _gone_unpack(packed: object) -> torch.Tensor:
    raise ReplayError(
        "The graph of a replay was differentiated; only the first forward's graph may be. Keep no tensor that a "
        "region's forward leaves outside its return value during backward (`recoup.is_recomputing()` tells).",
        code="E208",
    )


@contextlib.contextmanager
def _no_recorder() -> Iterator[None]:
    """Hides an outer recorder inside of the block, for a replay that saves everything."""
    recorder = current_recorder()
    if recorder is None:
        yield
        return
    recorder.paused += 1
    try:
        yield
    finally:
        recorder.paused -= 1
