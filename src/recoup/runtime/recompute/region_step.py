"""One call inside a region: its module, its inputs and the state that its replay starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recoup.errors import ReplayError
from recoup.runtime.recompute.ambient import Ambient
from recoup.runtime.recompute.bindings import Bindings, storage_of
from recoup.runtime.recompute.inputs import Inputs
from recoup.runtime.recompute.module_state import AttributeState, walk
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.recompute.rng_state import AutocastState, RandomState, StreamState, statistics_buffers
from recoup.runtime.recompute.saved_outputs import Kept
from recoup.thresholds import SMALL_BYTES

_nothing = contextlib.nullcontext()


class Step:
    """One call inside a frame: the forward, its arguments, and the state that it started from."""

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
        self.attributes = AttributeState(modules, self.inputs.others, written, member.places.notes)
        self.streams = StreamState([*self.inputs.others, *self.attributes.others])
        self.objects = member.places.note(modules, self.attributes.others) if has_attributes else None
        self.bindings = Bindings(modules, member.places)
        self.given = {storage_of(t) for t in self.inputs.tensors}
        self.ambient = Ambient()
        self.inputs.forget()

    def settle(self) -> None:
        """Drops noted state that the forward did not change; call it after the forward."""
        self.random.settle()
        self.attributes.settle()
        if self.objects is not None:
            self.objects.settle()

    def check(self, path: str) -> None:
        """Raises ReplayError if something that the replay would read was changed in place."""
        self.bindings.check(path)
        self.inputs.check()
        what = self.attributes.changed() or (self.objects.changed() if self.objects is not None else "")
        if what:
            raise ReplayError(
                f"Region `{path}`: its tensor `{what}` was changed in place since its forward began, after it or being "
                f"larger than {SMALL_BYTES} bytes, so a second forward would read other values. Name it in the "
                "decision's `buffers` (`recoup.plan` does), bind a new tensor instead (`self.x = self.x + ...`), or "
                "leave this module out of the plan.",
                code="E203",
            )

    def run_again(self, args: Any, kwargs: Any, *, with_attributes: bool) -> Any:
        """Runs the forward again from the noted state; afterwards the current state is restored."""
        changes = self._changes()
        with self.attributes_again() if with_attributes else _nothing:
            if not changes and self.ambient.is_here() and not self.kept.results:
                return self.ambient.run(self.forward, args, kwargs)
            with contextlib.ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                if not self.ambient.is_here():
                    stack.enter_context(self.ambient.replayed())
                stack.enter_context(self.kept.taking())
                return self.ambient.run(self.forward, args, kwargs)

    def _changes(self) -> list[contextlib.AbstractContextManager[None]]:
        """Returns contexts that restore streams and autocast where they differ from the note."""
        changes: list[contextlib.AbstractContextManager[None]] = []
        if not self.random.is_settled():
            changes.append(self.random.replayed())
        if not self.autocast.is_off():
            changes.append(self.autocast.replayed())
        if self.streams:
            changes.append(self.streams.replayed())
        return changes

    @contextlib.contextmanager
    def attributes_again(self) -> Iterator[None]:
        """Restores parameters, children, attributes and objects inside of the block, the current ones at its end."""
        with (
            _nothing if self.bindings.stand() else self.bindings.replayed(),
            self.attributes.replayed(),
            _nothing if self.objects is None else self.objects.replayed(),
        ):
            yield


class Member:
    """A module whose call is a region, or part of one: fixed when the plan is applied.

    Attributes:
        path: module path, for messages.
        module: weak reference to the module.
        forward: the forward to run.
        buffers: names of the buffers that the forward changes.
        derives: whether the replay may rederive.
        derives_by_default: the same outside of deeper decisions.
        offloads: whether its inputs are moved to the host.
        keep: labels of ops whose results are kept, see `saved_outputs`.
        places: where its modules keep state besides their attributes; shared by all calls.
        unwritten: positions, among the saved tensors, of those that a kernel leaves unwritten; shared by all calls.
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
