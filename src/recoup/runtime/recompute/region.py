"""The action *recompute*: a region keeps its inputs and runs its forward again in backward.

The first forward runs under saved-tensor hooks that keep nothing but numbered `Slot`s. The first slot that backward
asks for replays the forward from the kept inputs; the k-th tensor saved in the replay fills the k-th slot, and the
replay stops at the last one. Inputs are saved through autograd (`inputs.py`), so hooks around the region, a
region around the region, or a user's own, see them: regions nest, and an input can be rederived. The replay saves
through `saved_tensor.pack`, so a region may hold only what cheap ops cannot rebuild.

A *span* is one region over several calls that follow each other, each one's first argument being exactly what the one
before returned. No user code changes: a call joins the open span when it is handed that very tensor. The calls of a
span may be regions and spans again: the first forward opens them too, so that it and the replay save alike.

A *chunk* is one region over several calls of the same module, as a loop over time makes them. What a call is handed of
the outputs of the call before is not kept, and the module's attributes are noted once, when the chunk begins: its
replay runs the calls in a row, and state goes from call to call as it did.

Compared with `torch.utils.checkpoint` (non-reentrant, whose slot-filling idea this follows): rederive inside, spans,
buffers and foreign random streams handled, errors that name the module.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from recoup import _torch
from recoup._allocation import is_allocation_failure
from recoup._pytree import iterate_tensors
from recoup.errors import ReplayError
from recoup.runtime import execution_context
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.lineage import Recorder, current_recorder
from recoup.runtime.recompute.ambient import Ambient
from recoup.runtime.recompute.bindings import Bindings, storage_of
from recoup.runtime.recompute.inputs import Inputs
from recoup.runtime.recompute.module_state import COPIED_BYTES, AttributeState, walk
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.recompute.rng_state import AutocastState, RandomState, StreamState, statistics_buffers
from recoup.runtime.recompute.saved_outputs import Kept
from recoup.runtime.recompute.spot_check import Sample
from recoup.runtime.recompute.uninitialised import saves_unwritten


class _Stop(BaseException):
    """Ends a replay whose last slot is filled; a BaseException so that no model's `except Exception` eats it."""


class Slot:
    """A tensor saved inside a region: not there until the region is replayed."""

    __slots__ = ("__weakref__", "backward_id", "dtype", "filled", "frame", "original", "sample", "shape", "weight")

    def __init__(self, frame: Frame, tensor: torch.Tensor) -> None:
        self.frame = frame
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.weight = frame.weight_of(tensor)
        self.sample = Sample(tensor)
        self.original = execution_context.original(tensor)  # only while `verify` compares whole values
        self.filled: Any = None
        self.backward_id = -1

    def unpack(self) -> torch.Tensor:
        """Returns the tensor, after replaying the region if this backward pass has not done so."""
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


class _Step:
    """One call inside a frame: what to run, on what, in which state."""

    __slots__ = (
        "ambient",
        "attributes",
        "autocast",
        "bindings",
        "forward",
        "given",
        "inputs",
        "kept",
        "objects",
        "random",
        "streams",
    )

    def __init__(
        self,
        member: Member,
        args: Any,
        kwargs: Any,
        previous: list[torch.Tensor | None],
        *,
        has_attributes: bool = True,
    ) -> None:
        self.forward = member.forward
        self.kept = Kept(member.keep)
        modules = walk(member.module()) if has_attributes else []
        self.inputs = Inputs(member.path, args, kwargs, previous, offloads=member.offloads)
        self.random = RandomState(self.inputs.tensors)
        self.autocast = AutocastState(t.device.type for t in self.inputs.tensors)
        written = (*member.buffers, *statistics_buffers(modules)) if has_attributes else ()
        self.attributes = AttributeState(modules, self.inputs.others, written)
        self.streams = StreamState([*self.inputs.others, *self.attributes.others])
        self.objects = member.places.note(modules, self.attributes.others) if has_attributes else None
        self.bindings = Bindings(modules)
        self.given = {storage_of(t) for t in self.inputs.tensors}
        self.ambient = Ambient()
        self.inputs.forget()

    def settle(self) -> None:
        """Forgets what the forward, which is over now, did not change."""
        self.random.settle()
        self.attributes.settle()
        if self.objects is not None:
            self.objects.settle()

    def check(self, path: str) -> None:
        """Raises if something was changed in place that the second forward would read."""
        self.bindings.check(path)
        self.inputs.check()
        what = self.attributes.changed() or (self.objects.changed() if self.objects is not None else "")
        if what:
            raise ReplayError(
                f"Region `{path}`: its tensor `{what}` was changed in place since its forward began, after it or being "
                f"larger than {COPIED_BYTES} bytes, so a second forward would read other values. Name it in the "
                "decision's `buffers` (`recoup.plan` does), bind a new tensor instead (`self.x = self.x + ...`), or "
                "leave this module out of the plan.",
                code="E203",
            )

    @contextlib.contextmanager
    def state(self, *, with_attributes: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.random.replayed())
            stack.enter_context(self.autocast.replayed())
            stack.enter_context(self.streams.replayed())
            if with_attributes:
                stack.enter_context(self.bindings.replayed())
                stack.enter_context(self.attributes.replayed())
                if self.objects is not None:
                    stack.enter_context(self.objects.replayed())
            stack.enter_context(self.ambient.replayed())
            yield


class Member:
    """A module whose call is a region, or part of one: fixed when the plan is applied.

    Attributes:
        path: for messages. module: weakly held. forward: what runs. buffers: names of those its forward changes.
        derives: whether the replay may rederive; derives_by_default: outside of deeper decisions.
        offloads: whether its inputs go to the host. keep: labels of ops whose results stay, see `saved_outputs`.
        places: where its modules keep state besides their attributes; all calls share it.
        unwritten: positions, among the tensors saved, of those known to be left unwritten; all calls share it.
    """

    def __init__(
        self,
        *,
        path: str,
        module: Callable[[], torch.nn.Module],
        forward: Callable[..., Any],
        buffers: tuple[str, ...],
        derives: bool,
        derives_by_default: bool,
        offloads: bool = False,
        keep: tuple[str, ...] = (),
        unwritten: set[int] | None = None,
        places: Places | None = None,
    ) -> None:
        self.path = path
        self.places = Places() if places is None else places
        self.unwritten = set() if unwritten is None else unwritten
        self.module = module
        self.forward = forward
        self.buffers = buffers
        self.derives = derives
        self.derives_by_default = derives_by_default
        self.offloads = offloads
        self.keep = keep


class Frame:
    """One execution of a region: its steps, its slots, and the way to fill them.

    Attributes:
        is_chunk: its steps are calls of one module, which share what the module's attributes were at the first.
    """

    def __init__(self, member: Member, *, is_chunk: bool = False) -> None:
        self.is_chunk = is_chunk
        self.path = member.path
        self.counts = execution_context.current_counts()
        self.unwritten = member.unwritten
        self.derives = member.derives
        self.derives_by_default = member.derives_by_default
        self.steps: list[_Step] = []
        self.slots: list[weakref.ref[Slot]] = []
        self.last_outputs: list[weakref.ref[torch.Tensor]] = []
        self.weights: set[int | None] = set()
        self.given: set[int | None] = {None}

    def weight_of(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Returns which weight a saved tensor is, and how it lies over it; None for an activation or an argument."""
        storage = storage_of(tensor)
        base = tensor if tensor._base is None else tensor._base
        if storage in self.given or not (storage in self.weights or isinstance(base, torch.nn.Parameter)):
            return None
        return storage, tensor.stride(), tensor.storage_offset()

    def _pack(self, tensor: torch.Tensor) -> Slot:
        with _torch.past_function_modes():
            slot = Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def previous(self) -> list[torch.Tensor | None]:
        """Returns the outputs of the last call, None for those that are gone."""
        return [ref() for ref in self.last_outputs]

    def run(self, member: Member, args: Any, kwargs: Any, previous: list[torch.Tensor | None]) -> Any:
        """Runs a call's first forward, keeping nothing that it saves."""
        with _torch.past_function_modes():
            step = _Step(member, args, kwargs, previous, has_attributes=not (self.is_chunk and self.steps))
        del previous
        self.weights |= step.bindings.storages
        self.given |= step.given
        recorder = current_recorder()
        hooks = _torch.saved_tensors_hooks(self._pack, _unpack)
        _scope.depth += 1
        if recorder is not None:
            recorder.paused += 1
        try:
            with hooks, step.kept.noting():
                output = member.forward(*args, **kwargs)
        finally:
            _scope.depth -= 1
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
        """Runs the region again and fills its slots."""
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
                elif position not in self.unwritten and not slot.sample.matches(tensor):
                    differs.append((position, _torch.next_node_number() - 1, tensor))
                slot.filled = saved_tensor.pack(tensor.detach())
                slot.backward_id = backward_id
            if filled == len(self.slots) and not differs:  # else the graph tells what it means, when it is whole
                is_full = True
                raise _Stop
            return _gone

        with contextlib.ExitStack() as stack:
            stack.enter_context(execution_context.recomputing())
            stack.enter_context(execution_context.counting_to(self.counts))
            stack.enter_context(_scope.replaying())
            stack.enter_context(torch.enable_grad())
            if self.derives:
                recorder = stack.enter_context(Recorder())
                recorder.deriving = self.derives_by_default
            else:
                stack.enter_context(_no_recorder())
            stack.enter_context(_torch.saved_tensors_hooks(fill, _gone_unpack))
            try:
                if self.is_chunk:
                    stack.enter_context(self.steps[0].bindings.replayed())
                    stack.enter_context(self.steps[0].attributes.replayed())
                    if self.steps[0].objects is not None:
                        stack.enter_context(self.steps[0].objects.replayed())
                previous: list[torch.Tensor] = []
                for step in self.steps:
                    args, kwargs = step.inputs.rebuild(previous)
                    with step.state(with_attributes=not self.is_chunk), step.kept.taking():
                        output = step.ambient.run(step.forward, args, kwargs)
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

    def _mismatch(self, position: int, tensor: torch.Tensor) -> ReplayError | None:
        """Returns the error that says that the first forward saved something else there, None if it did not."""
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

    def _explain(self, error: Exception, step: _Step) -> NoReturn:
        """Raises what a replay's forward raised, with the region's path."""
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


def _unpack(slot: Slot) -> torch.Tensor:
    return slot.unpack()


_gone = object()


def _gone_unpack(packed: object) -> torch.Tensor:
    raise ReplayError(
        "The graph of a replay was differentiated; only the first forward's graph may be. Keep no tensor that a "
        "region's forward leaves outside its return value during backward (`recoup.is_recomputing()` tells).",
        code="E208",
    )


@contextlib.contextmanager
def _no_recorder() -> Iterator[None]:
    """Hides an outer recorder from a replay that saves everything."""
    recorder = current_recorder()
    if recorder is None:
        yield
        return
    recorder.paused += 1
    try:
        yield
    finally:
        recorder.paused -= 1


class _Scope(threading.local):
    """Where this thread is: `depth` regions deep in a first forward, or in a replay.

    `spans`: the frame that each span has open. A frame lives as long as a graph needs it; a replay opens its own.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_replay = False
        self.spans: weakref.WeakValueDictionary[int, Frame] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        before = self.depth, self.in_replay, self.spans
        self.depth, self.in_replay, self.spans = 0, True, weakref.WeakValueDictionary()
        try:
            yield
        finally:
            self.depth, self.in_replay, self.spans = before


_scope = _Scope()


def inside_region() -> bool:
    """Whether a region runs or is replayed: then its saved-tensor hooks are the ones that count."""
    return _scope.depth > 0 or _scope.in_replay


def continues(span: object, paths: Sequence[str], path: str, args: Any) -> bool:
    """Whether a call is the next of a span that is open: the right module, handed what the call before it returned.

    A module may be called several times in a step, and several times in a span; only this tells its calls apart.

    Args:
        paths: the calls of the span after its first.
    """
    frame = _scope.spans.get(id(span))
    if frame is None or not 0 < len(frame.steps) <= len(paths) or paths[len(frame.steps) - 1] != path:
        return False
    previous = frame.previous()
    return bool(previous) and previous[0] is not None and next(iterate_tensors(args), None) is previous[0]


def run_region(
    member: Member, args: Any, kwargs: Any, *, span: object | None = None, begins_chunk: bool | None = None
) -> Any:
    """Runs a module's forward as a region.

    Args:
        span: says which span or chunk the call is part of. In a span it joins the open frame if it is handed the very
            tensor that the call before returned, and opens a new one otherwise.
        begins_chunk: whether it is the first of its chunk; None: it is in none.
    """
    if not torch.is_grad_enabled() or _torch.inside_transform():
        return member.forward(*args, **kwargs)
    frame: Frame | None = None
    previous: list[torch.Tensor | None] = []
    if span is not None and not begins_chunk:
        frame = _scope.spans.get(id(span))
        previous = frame.previous() if frame is not None else []
        is_handed_on = bool(previous) and previous[0] is not None and next(iterate_tensors(args), None) is previous[0]
        if begins_chunk is None and not is_handed_on:
            frame, previous = None, []
    if frame is None:
        frame = Frame(member, is_chunk=begins_chunk is not None)
        if span is not None:
            _scope.spans[id(span)] = frame
    try:
        return frame.run(member, args, kwargs, previous)
    except ReplayError as error:
        error.region = error.region or member.path
        raise


def _moves(weight: torch.Tensor) -> bool:
    """Whether ZeRO-3 gathers a weight, or what it is a view of, into other memory each time."""
    return hasattr(weight, "ds_id") or hasattr(weight._base, "ds_id")
