"""The second forward of a region: runs its steps again and fills its slots, each held against what was first saved."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from recoup import _torch
from recoup._allocation import is_allocation_failure
from recoup._pytree import iterate_tensors
from recoup.errors import ReplayError
from recoup.runtime import execution_context
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.kept import kept_simply
from recoup.runtime.rebuild.lineage import Recorder, current_recorder
from recoup.runtime.recompute.region_step import Step
from recoup.runtime.recompute.scope import replaying
from recoup.runtime.recompute.spot_check import Kind, matches
from recoup.runtime.recompute.uninitialised import saves_unwritten

if TYPE_CHECKING:
    from recoup.runtime.recompute.frame import Frame


class _Stop(BaseException):
    """Ends a replay whose last slot is filled. A BaseException: a model's `except Exception` must not catch it."""


class Replay:
    """One replay of a frame."""

    __slots__ = (
        "__weakref__",
        "_differs",
        "_failure",
        "_filled",
        "_frame",
        "_is_plain",
        "_num_slots",
        "_roots",
        "_slots",
    )

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._slots = frame.slots
        self._num_slots = len(frame.slots)
        self._filled = 0
        self._failure: ReplayError | None = None
        self._differs: list[tuple[int, int, torch.Tensor]] = []  # position, number of the node that saves it, tensor
        self._roots: list[Any] = []
        # Nobody rebuilds from what is saved without a recorder, and nobody counts it without an observer.
        self._is_plain = not frame.derives and execution_context.observer() is None

    def run(self) -> None:
        """Fills the slots."""
        frame = self._frame
        with (
            execution_context.recomputing(),
            execution_context.counting_to(frame.counts),
            replaying(),
            _torch.grad_enabled(),
            self._recording(),
            _torch.saved_tensors_hooks(_filling(self), _gone_unpack),
        ):
            try:
                self._run_steps()
            except _Stop:
                return
        self._conclude()

    def _run_steps(self) -> None:
        frame = self._frame
        step: Step | None = None  # there is none yet where a forward differentiates what it has made so far
        try:
            with frame.steps[0].attributes_again() if frame.is_chunk else _nothing:
                previous: list[torch.Tensor] = []
                for step in frame.steps:
                    args, kwargs = step.inputs.rebuild(previous)
                    output = step.run_again(args, kwargs, with_attributes=not frame.is_chunk)
                    self._roots += [t.grad_fn for t in iterate_tensors(output)] if self._differs else []
                    previous = list(iterate_tensors(output)) if frame.is_chunk else [output]
                    del args, kwargs, output
        except Exception as error:  # user code runs here: whatever it raises gets the region's path
            if not self._is_full() and self._failure is None:
                self._explain(error, step)

    def _is_full(self) -> bool:
        return self._filled >= self._num_slots and not self._differs

    def _fill(self, tensor: torch.Tensor) -> Any:
        """Takes a tensor that the forward saves: called by the saved-tensor hook."""
        if _torch.function_modes_are_on():
            with _torch.past_function_modes():
                return self._fill(tensor)
        position = self._filled
        if self._failure is not None:
            raise self._failure
        if position >= self._num_slots:
            if not self._differs:
                raise _Stop  # again: an `except:` of the model's has eaten the first one
            self._failure = self._frame.drift("saved more tensors than the first one", "E205")
            raise self._failure
        slot = self._slots[position]()
        if slot is not None:
            frame = self._frame
            kind, sample = frame.facts_of(tensor)
            if kind != slot.kind:
                self._failure = self._mismatch(slot.kind, kind, tensor)
                if self._failure is not None:
                    raise self._failure
            original = frame.originals.get(position)
            if original is not None:
                original.compare(tensor, frame.path)
            elif (
                sample != slot.sample
                and position not in frame.unwritten
                and not matches(slot.sample, sample, tensor.dtype)
            ):
                self._differs.append((position, _torch.next_node_number() - 1, tensor))
            slot.filled = kept_simply(tensor) if self._is_plain else saved_tensor.pack(tensor.detach())
        self._filled = position + 1
        if (
            position + 1 == self._num_slots and not self._differs
        ):  # else the graph tells what it means, when it is whole
            raise _Stop
        return _gone

    def _conclude(self) -> None:
        """Raises ReplayError unless the forward saved what the first one did; it has run to its end."""
        frame = self._frame
        if self._failure is not None:
            raise self._failure
        for position, number, tensor in self._differs:
            if not saves_unwritten(self._roots, number, tensor):
                raise frame.drift(f"saved other values in {tensor.dtype} {list(tensor.shape)}", "E206")
            frame.unwritten.add(position)
        # Once they are full, TorchScript or an `except:` may make what it likes of _Stop.
        if self._filled < self._num_slots:
            raise frame.drift(f"saved {self._filled} tensors where the first one saved {self._num_slots}", "E205")

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a replay: with rederive inside, or saving everything."""
        if self._frame.derives:
            recorder = Recorder()
            recorder.deriving = self._frame.derives_by_default
            return recorder
        return _nothing if current_recorder() is None else _no_recorder()

    def _mismatch(self, first: Kind, again: Kind, tensor: torch.Tensor) -> ReplayError | None:
        """Returns the error for a tensor of another shape, dtype or weight than the one first saved; None if alike."""
        if first[0] != again[0] or first[1] != again[1]:
            saved = f"saved {again[1]} {list(again[0])} where the first one saved {first[1]} {list(first[0])}"
            return self._frame.drift(saved, "E205")
        weights = again[2], first[2]
        if weights[0] == weights[1] or (None not in weights and _moves(tensor)):
            return None
        kinds = ["an activation" if w is None else "a weight" for w in weights]
        return self._frame.drift(f"saved {kinds[0]} where the first one saved {kinds[1]}, or another one", "E205")

    def _explain(self, error: Exception, step: Step | None) -> NoReturn:
        """Raises a ReplayError for an exception of a replay's forward, with the region's path."""
        if isinstance(error, ReplayError):
            raise error
        if is_allocation_failure(error):
            error.add_note(f"while region `{self._frame.path}` ran its forward a second time")
            raise error
        if step is not None and "a leaf Variable that requires grad is being used in an in-place" in str(error):
            raise step.inputs.refusal("one of its arguments") from error
        raise self._frame.drift(f"failed: {type(error).__name__}: {error}", "E207") from error


def _filling(replay: Replay) -> Callable[[torch.Tensor], Any]:
    """Returns the saved-tensor hook of a replay, which holds it weakly.

    The graph that a replay makes holds the hook, and what a replay notes (nodes, an error with its frames) holds the
    graph. Graphs are in C++, where the collector finds no cycle: the region and all that it holds would stay for ever.
    """
    ref = weakref.ref(replay)

    def fill(tensor: torch.Tensor) -> Any:
        running = ref()
        assert running is not None, "who makes the graph is there while it is made"
        return running._fill(tensor)

    return fill


def _moves(weight: torch.Tensor) -> bool:
    """Whether ZeRO-3 gathers a weight, or its base, into other memory each time."""
    return hasattr(weight, "ds_id") or hasattr(weight._base, "ds_id")


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
