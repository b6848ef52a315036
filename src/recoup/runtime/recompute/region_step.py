"""One call inside a region: its module, its inputs and the state that its replay starts from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup.errors import ReplayError
from recoup.runtime.recompute.ambient import Ambient
from recoup.runtime.recompute.bindings import Bindings
from recoup.runtime.recompute.inputs import Inputs
from recoup.runtime.recompute.module_state import AttributeState, walk
from recoup.runtime.recompute.object_state import ObjectState, Places
from recoup.runtime.recompute.rng_state import AutocastState, RandomState, StreamState, statistics_buffers
from recoup.runtime.recompute.saved_outputs import Kept
from recoup.runtime.recompute.spot_check import storage_of
from recoup.runtime.recompute.tables import Standing, Tables, Versions
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
        "tables",
        "versions",
    )

    def __init__(
        self,
        member: Member,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        previous: list[torch.Tensor | None],
        *,
        has_attributes: bool = True,
    ) -> None:
        self.forward = forward
        self.kept = Kept(member.keep)
        self.objects: ObjectState | None = None
        self.tables: Tables | None = None
        self.versions: Versions | None = None
        self.inputs = inputs = Inputs(member.path, args, kwargs, previous, offloads=member.offloads)
        self.random = RandomState(inputs.tensors)
        self.autocast = AutocastState([t.device.type for t in inputs.tensors if not t.is_cpu])
        modules = self._note_attributes(member) if has_attributes else self._note_objects()
        self.streams = StreamState([*inputs.others, *self.attributes.others])
        self.bindings = Bindings(modules, member.places)
        self.given = {storage_of(t) for t in inputs.tensors}
        self.ambient = Ambient()
        inputs.forget()

    def _note_objects(self) -> list[tuple[str, nn.Module]]:
        """Notes the objects among the arguments alone, for a call whose modules' attributes are noted elsewhere."""
        self.attributes = AttributeState((), self.inputs.others)
        return []

    def _note_attributes(self, member: Member) -> list[tuple[str, nn.Module]]:
        """Notes attributes and objects, what was noted in an earlier step where it still holds; returns the modules."""
        places, others, module = member.places, self.inputs.others, member.module()
        standing = places.standing
        if standing is not None and not others and standing.tables.are_of(module):
            versions = standing.tables.versions()
            if versions is not None and versions == standing.versions:
                modules = standing.tables.modules()
                self.attributes, self.tables, self.versions = standing.attributes, standing.tables, versions
                self.objects = places.note_again() or places.note(modules, self.attributes.others)
                return modules
        modules = walk(module)
        written = (*member.buffers, *statistics_buffers(modules))
        self.attributes = AttributeState(modules, others, written, places.notes)
        self.objects = places.note(modules, self.attributes.others)
        self.tables = None if others else self.attributes.tables(modules)
        if self.tables is not None:
            self.versions = self.tables.versions()
            places.standing = Standing(self.tables, self.versions, self.attributes)
        return modules

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
        if not with_attributes:
            return self._run(args, kwargs)
        if not self._stands():
            with self.attributes_again():
                return self._run(args, kwargs)
        try:
            return self._run(args, kwargs)
        finally:  # what the replay itself has changed
            if not self._has_same_tables():
                self.attributes.put_back()
            if self.objects is not None:
                self.objects.put_back()

    def _has_same_tables(self) -> bool:
        """Whether no table of the modules has changed since the note, as far as that can be told at once."""
        return self.tables is not None and self.versions is not None and self.tables.versions() == self.versions

    def _stands(self) -> bool:
        """Whether parameters, children, attributes and objects are as the forward found them."""
        if not self.bindings.have_same_flags() or (self.objects is not None and not self.objects.stands()):
            return False
        return self._has_same_tables() or (self.bindings.are_same() and self.attributes.stands())

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Runs the forward under the streams, autocast and ambient state of the note."""
        is_here = self.ambient.is_here()
        changes = self._changes()
        if is_here and not changes and not self.kept.results:
            return self.ambient.run(self.forward, args, kwargs)
        with contextlib.ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            if not is_here:
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
            _nothing if self.bindings.are_same() and self.bindings.have_same_flags() else self.bindings.replayed(),
            self.attributes.replayed(),
            _nothing if self.objects is None else self.objects.replayed(),
        ):
            yield


class Member:
    """A module whose call is a region, or part of one: fixed when the plan is applied.

    Attributes:
        path: module path, for messages.
        module: weak reference to the module.
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
        self.buffers = buffers
        self.derives = derives
        self.derives_by_default = derives_by_default
        self.offloads = offloads
        self.keep = keep
