"""Snapshot of all that a training step can change, restored after a trial whatever happened.

[Note: what is noted]
1. Containers and attributes cost a shallow copy. Objects stay the ones they are: a list is given its items back.
2. A tensor's size, storage, `.grad`, `requires_grad` and version cost a reference. Its values are copied at once if it
   is small; a large one's before the first op that writes it, seen by `watching()`, to host memory. What is run outside
   of `watching()` (under a meter or a clock) has run inside it before, from the same state.
3. What cannot be put back (a generator, an open file) has a stand-in while steps are tried, which refuses to be used.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
import operator
import random
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._interrupts import heard, postponed, under_modes
from recoup._reachable import Reached, roots_of, slots_of
from recoup.capture.tensor_notes import CopyBeforeWrite, TensorNotes
from recoup.errors import UsageError
from recoup.runtime.patch import PatchedMethod
from recoup.runtime.recompute.rng_state import StreamState

_ABSENT = object()


class Snapshot:
    """The state that a step can reach; see the note above."""

    def __init__(self, model: nn.Module, batch: Any = None, loss: Any = None, others: Any = ()) -> None:
        found = Reached(roots_of(model, batch, loss, others), follows_hooks=True)
        self._found = found
        self._containers = [(name, item, _shallow(item)) for name, item in found.containers]
        self._slots = [(name, item, _slot_values(item)) for name, item in found.slotted]
        self._classes = [(name, kind, dict(vars(kind))) for name, kind in found.classes]
        self._cells = [(name, cell, _contents(cell)) for name, cell in found.cells]
        self._bindings = [(name, scope, key, scope.get(key, _ABSENT)) for name, scope, key in found.bindings]
        self._arrays = [(name, item, item.copy()) for name, item in found.arrays if item.flags.writeable]
        self._raw = [(name, item, item[:]) for name, item in found.raw]
        self._forwards = {id(m.__dict__) for m in model.modules()}
        known = {id(t) for _, t in found.tensors}
        inside = [*model.named_parameters(prefix="model"), *model.named_buffers(prefix="model")]  # TorchScript's too
        self.tensors = TensorNotes([*found.tensors, *((name, t) for name, t in inside if id(t) not in known)])
        self._marks = [(tensor, _torch.dynamic_marks(tensor)) for _, tensor in found.tensors]
        self._streams = StreamState(item for _, item in found.streams)
        self._random = random_state()
        copies = {id(value): _copy_of_iterator(value) for _, _, _, value in found.once_only}
        self._iterators = {key: value for key, value in copies.items() if value is not None}

    def restore(self) -> None:
        """Puts everything back."""
        for _, container, held in self._containers:
            _refill(container, held, keeps_forward=id(container) in self._forwards)
        for _, item, values in self._slots:
            for slot, value in values.items():
                if getattr(item, slot, _ABSENT) is not value:
                    _put(item, slot, value)
        for _, kind, before in self._classes:
            for key in [*vars(kind), *before]:
                if vars(kind).get(key, _ABSENT) is not before.get(key, _ABSENT) and not key.startswith("__"):
                    _put(kind, key, before.get(key, _ABSENT))
        for _, cell, value in self._cells:
            if value is not _ABSENT and _contents(cell) is not value:
                cell.cell_contents = value
        for _, scope, key, value in self._bindings:
            if scope.get(key, _ABSENT) is not value:
                scope.pop(key, None) if value is _ABSENT else scope.__setitem__(key, value)
        for _, array, values in self._arrays:
            if array.dtype.hasobject or array.tobytes() != values.tobytes():
                array[...] = values
        for _, raw, values in self._raw:
            if raw != values:
                raw[:] = values
        self.tensors.restore()
        for tensor, marks in self._marks:
            _torch.set_dynamic_marks(tensor, marks)
        self._streams.restore()
        set_random_state(self._random)

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Inside the block, large tensors are copied before an op writes to them."""
        watch: contextlib.AbstractContextManager[Any] = CopyBeforeWrite(self.tensors)
        return watch

    def changes(self) -> dict[str, Any]:
        """Returns the differences since the snapshot, by name: of tensors' values, and in words of other objects."""
        found: dict[str, Any] = dict(self.tensors.changes())
        for name, container, held in self._containers:
            found.update(_differences(name, container, held, skips_forward=id(container) in self._forwards))
        for name, item, values in self._slots:
            now = {slot: getattr(item, slot, _ABSENT) for slot in values}
            found.update(_differences(name, now, values))
        for name, kind, before in self._classes:
            now = {k: v for k, v in vars(kind).items() if not k.startswith("__")}
            found.update(_differences(name, now, {k: v for k, v in before.items() if not k.startswith("__")}))
        for name, cell, value in self._cells:
            found.update(_differences(name, {"": _contents(cell)}, {"": value}))
        for name, scope, key, value in self._bindings:
            found.update(_differences("", {name: scope.get(key, _ABSENT)}, {name: value}))
        for name, array, values in self._arrays:
            if array.tobytes() != values.tobytes():
                found[name] = array.tobytes()
        found.update({name: bytes(raw) for name, raw, values in self._raw if raw != values})
        return {name.removeprefix("model."): value for name, value in found.items()}

    def renew_iterators(self) -> None:
        """Resets copyable iterators to their positions at the snapshot; one with two references stays one object."""
        fresh = {key: _copy_of_iterator(noted) for key, noted in self._iterators.items()}
        for _, holder, key, value in self._found.once_only:
            if id(value) in fresh:
                _set(holder, key, fresh[id(value)])

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Replaces objects that can be used only once by stand-ins; `restore` puts the originals back too."""
        self.renew_iterators()
        for name, holder, key, value in self._found.once_only:
            if id(value) not in self._iterators:
                _set(holder, key, _StandIn(name.removeprefix("model."), value))
        try:
            yield
        finally:
            for _, holder, key, value in self._found.once_only:
                _set(holder, key, value)


class _StandIn:
    """Replaces an object that can be used only once, and raises an error that says so when it is used."""

    def __init__(self, name: str, original: Any) -> None:
        self.__dict__["_refusal"] = (
            f"`{name}` is a {type(original).__name__}: a step uses it up, and recoup cannot put it back after the "
            "steps that it tries. Hand the step what it gives instead (a list, a tensor of the batch)."
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(self.__dict__["_refusal"])

    __iter__ = __next__ = __enter__ = __call__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        holder[key] = value


def _copy_of_iterator(value: Any) -> Any:
    """Returns a copy of one of itertools' objects, where Python still makes them; None for anything else."""
    if type(value).__module__ != "itertools":
        return None
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # a deprecated service: gone, it is done without
        warnings.simplefilter("ignore")
        return copy.deepcopy(value)
    return None


def parameters_outside(model: nn.Module, snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Returns the tensors that a step may train and that are no parameters of the model, by name."""
    own = {id(p) for p in model.parameters()}
    named = snapshot.tensors.named().items()
    return {name.removeprefix("model."): t for name, t in named if t.requires_grad and t.is_leaf and id(t) not in own}


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _slot_values(item: Any) -> dict[str, Any]:
    return {slot: getattr(item, slot, _ABSENT) for slot in slots_of(type(item))}


def _put(item: Any, name: str, value: Any) -> None:
    setter = type.__setattr__ if isinstance(item, type) else object.__setattr__
    with contextlib.suppress(AttributeError):
        delattr(item, name) if value is _ABSENT else setter(item, name, value)


def _shallow(container: Any) -> Any:
    """Returns a plain copy of what a container holds, whatever its class does when it is copied."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    return list(container) if isinstance(container, (list, collections.deque)) else set(container)


def _refill(container: Any, held: Any, *, keeps_forward: bool) -> None:
    """Restores the contents of a container; a plan that was applied since stays (`forward` of a module, methods)."""
    if isinstance(container, dict):
        if _is_as_it_was(container, held):
            return
        patches = {k: v for k, v in container.items() if _is_patch(k, v)} if keeps_forward else {}
        if patches or (keeps_forward and any(_is_patch(k, v) for k, v in held.items())):
            held = {k: v for k, v in held.items() if not _is_patch(k, v)} | patches
            if _is_as_it_was(container, held):
                return
        kind: Any = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
        kind.clear(container)
        for key, value in held.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        if container != held:
            set.clear(container)
            set.update(container, held)
    elif len(container) != len(held) or not all(map(operator.is_, container, held)):
        kind = list if isinstance(container, list) else collections.deque
        kind.clear(container)
        kind.extend(container, held)


def _is_patch(key: Any, value: Any) -> bool:
    """Whether an attribute of a module is where a plan is put in place."""
    return isinstance(value, PatchedMethod) or (type(key) is str and key == "forward")


def _is_as_it_was(container: Any, held: dict[Any, Any]) -> bool:
    """Whether a dict has the same objects under the same keys, in the same order."""
    if dict.__len__(container) != len(held) or not all(map(operator.is_, dict.values(container), held.values())):
        return False
    return all(map(operator.is_, dict.keys(container), held)) or list(dict.keys(container)) == list(held)


def _differences(name: str, now: Any, before: Any, *, skips_forward: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields what is not the same object, as far as it can be compared between two runs."""
    if isinstance(now, dict):
        now = _by_order(now, before) if "_hooks" in name.rpartition(".")[2] else now
        for key in dict.fromkeys([*before, *now]):
            one, other = now.get(key, _ABSENT), before.get(key, _ABSENT)
            if one is not other and not (skips_forward and (_is_patch(key, one) or _is_patch(key, other))):
                where = f"{name}.{key}" if name and key != "" else f"{name}{key}"
                yield where, _told(one)
    elif isinstance(now, set):
        if now != before:
            yield name, len(now)
    elif len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
        yield name, tuple(_told(item, inside=True) for item in now)


def _by_order(now: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Names the hooks that a step registered by their order: their numbers are never given twice."""
    added = itertools.count()
    return {key if key in before else f"new {next(added)}": value for key, value in now.items()}


def _told(value: Any, *, inside: bool = False) -> Any:
    """Returns a form of a value that can be compared between two runs; text where it is `inside` a container."""
    if isinstance(value, torch.Tensor):
        if inside:
            return f"{list(value.shape)} of sum {float(value.detach().double().sum())!r}"
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, dict, set)):
        return type(value).__name__, len(value)
    return "nothing" if value is _ABSENT else type(value).__name__


def random_state() -> tuple[Any, ...]:
    """Returns the global streams as they are now: torch's on the CPU and on CUDA devices, python's, numpy's."""
    cuda = torch.cuda.get_rng_state_all() if _torch.cuda_is_initialized() else None
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state() if numpy is not None else None


def set_random_state(state: tuple[Any, ...]) -> None:
    """Sets the global streams to what `random_state` returned."""
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


class KnownState:
    """The snapshot that steps in a row share: each puts everything back, so what the first one found holds for all.

    Attributes:
        snapshot: None outside of such a row, and before its first step.
    """

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self._depth = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Shares one snapshot among the steps inside the block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.snapshot = None

    def note(self, model: nn.Module, batch: Any, loss: Any) -> None:
        """Takes the snapshot, if there are steps to share it and none did yet."""
        if self._depth and self.snapshot is None:
            self.snapshot = Snapshot(model, batch, loss)


@contextlib.contextmanager
def untouched(
    model: nn.Module, batch: Any = None, loss: Any = None, others: Any = (), *, known: Snapshot | None = None
) -> Iterator[Snapshot]:
    """Restores at the end what a step that is given these can change.

    Args:
        known: a snapshot of just that, if everything is known to be as it was then.
    """
    with heard(), under_modes():
        before = Snapshot(model, batch, loss, others) if known is None else known
        try:
            try:
                with _torch.no_backward_left(), before.guarded():
                    yield before
            finally:
                with postponed():
                    before.restore()
        except BaseException:  # it may have come in that `finally`
            before.restore()
            raise
        finally:
            if known is not None:
                known.tensors.forget_run()
