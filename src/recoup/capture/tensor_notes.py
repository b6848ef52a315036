"""Tensors as they are at one moment: noted by reference, copied before something writes them, put back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import argument_tensors
from recoup.errors import UsageError
from recoup.runtime.rebuild.cheap_ops import SILENT_WRITERS, op_facts
from recoup.runtime.recompute.rng_state import version_of
from recoup.thresholds import SMALL_BYTES


class TensorNotes:
    """Tensors as they are at one moment."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._notes: dict[int, _Note] = {}
        self._of_storage: dict[int, list[_Note]] = {}
        for name, tensor in tensors:
            self.add(name, tensor)
        self._num_first = len(self._notes)

    def add(self, name: str, tensor: torch.Tensor) -> _Note | None:
        """Notes one more tensor and returns its note; None if it is noted already."""
        if id(tensor) in self._notes or _torch.is_fake(tensor):
            return None
        note = self._notes[id(tensor)] = _Note(name, tensor)
        if note.alias is not None:
            self._of_storage.setdefault(tensor.untyped_storage()._cdata, []).append(note)
        return note

    @contextlib.contextmanager
    def noting_leaves(self, leaves: Iterator[torch.Tensor]) -> Iterator[None]:
        """Notes the leaves that a backward inside the block gives gradients; one that the step made goes when it would.

        Parameters are noted at once (a hook may step them in backward); other tensors where they outlive the block.
        """
        name, others = "a tensor that the loss reaches", []
        for leaf in leaves:
            if isinstance(leaf, torch.nn.Parameter):
                self.add(name, leaf)
            else:
                others.append((weakref.ref(leaf), leaf.grad if leaf.is_leaf else None))
            del leaf
        try:
            yield
        finally:
            for ref, gradient in others:
                alive = ref()
                note = None if alive is None else self.add(name, alive)
                if note is not None:
                    note.grad = gradient

    def named(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by name."""
        return {note.name: note.tensor for note in self._notes.values()}

    def touched(self) -> list[torch.Tensor]:
        """Returns those that an op took while they were watched."""
        return [note.tensor for note in self._notes.values() if note.is_touched]

    def clear_gradients(self) -> None:
        """Takes the gradients off, so that a step makes its own."""
        for note in self._notes.values():
            if note.tensor.is_leaf and note.tensor.grad is not None:
                note.tensor.grad = None

    def takes(self, tensor: torch.Tensor) -> None:
        """Called with a tensor that an op reads or writes."""
        for note in self._of_storage.get(_storage_key(tensor), ()):
            note.is_touched = True

    def before_write(self, tensor: torch.Tensor) -> None:
        """Called with a tensor that an op is about to write."""
        for note in self._of_storage.get(_storage_key(tensor), ()):
            note.copy_values()

    def changes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields copies of the tensors whose values are not what they were."""
        for note in self._notes.values():
            if note.has_changed():
                yield note.name, note.tensor.detach().to("cpu", copy=True)

    @contextlib.contextmanager
    def copied(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Keeps copies of these values in host memory inside the block; puts them back at its end."""
        notes = [self._notes[id(t)] for t in tensors if id(t) in self._notes]
        new = [note for note in notes if note.copy is None]
        for note in new:
            note.copy_values()
        try:
            yield
        finally:
            self.restore()
            for note in new:
                note.copy = None

    def forget_run(self) -> None:
        """Drops what an undone run has added: notes of tensors that it made, and copies of large ones."""
        for identity in list(self._notes)[self._num_first :]:
            note = self._notes.pop(identity)
            if note.alias is not None:
                self._of_storage[note.tensor.untyped_storage()._cdata].remove(note)
        for note in self._notes.values():
            note.is_touched = False
            if note.copy is not None and note.copy.nbytes > SMALL_BYTES:
                note.copy = None

    def restore(self) -> None:
        """Puts sizes, values, gradients and flags back."""
        with torch.no_grad():
            for note in self._notes.values():
                note.restore()


class _Note:
    """One tensor as it is."""

    __slots__ = ("alias", "copy", "grad", "is_touched", "name", "nbytes", "needs_grad", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.needs_grad = tensor.requires_grad
        self.grad = tensor.grad if tensor.is_leaf else None
        self.version = version_of(tensor)
        self.is_touched = False
        self.alias: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self.nbytes = 0
        is_data = tensor.layout is torch.strided and tensor.device.type != "meta"
        if is_data and not (tensor.is_quantized or tensor.is_nested or _torch.is_wrapper(tensor)):
            data = tensor.data
            if _torch.is_fake(data):  # of a captured step, in a class of ours: logits that are not there yet
                return
            self.alias = data
            self.nbytes = tensor.untyped_storage().nbytes()
            if tensor.nbytes <= SMALL_BYTES:
                self.copy_values()

    def copy_values(self) -> None:
        """Copies the values to host memory, once."""
        if self.alias is not None and self.copy is None:
            with _torch.without_dispatch_modes(), torch.no_grad():
                self.copy = self.alias.to("cpu", copy=True)

    def _is_moved(self) -> bool:
        now, before = self.tensor, self.alias
        assert before is not None
        return (
            now.shape != before.shape
            or now.stride() != before.stride()
            or now.dtype != before.dtype
            or now.data_ptr() != before.data_ptr()
            or now.untyped_storage().nbytes() != self.nbytes
        )

    def has_changed(self) -> bool:
        """Whether the values differ, as far as there is a copy or the tensor is another."""
        if self.alias is None:
            return False
        if self._is_moved():
            return True
        return self.copy is not None and not _same(self.tensor.detach(), self.copy)

    def restore(self) -> None:
        tensor = self.tensor
        if tensor.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad
        if self.alias is None:
            return
        if not tensor.is_leaf and self.version != version_of(tensor) and not self.needs_grad:
            tensor.detach_()  # something that needs a gradient was written into it
        if tensor.is_leaf and tensor.requires_grad != self.needs_grad:
            tensor.requires_grad_(self.needs_grad)
        if self._is_moved():
            tensor.data = self.alias
            if self.alias.untyped_storage().nbytes() != self.nbytes:
                self.alias.untyped_storage().resize_(self.nbytes)
        if self.copy is not None and not _same(self.alias, self.copy):
            self.alias.copy_(self.copy)
        if version_of(tensor) != self.version:
            if self.copy is None and not tensor.is_inference():
                raise UsageError(
                    f"`{self.name.removeprefix('model.')}` ({list(tensor.shape)}) was changed in place by a step that "
                    "recoup tried, in a way that it had not seen before, and could not be put back. Make the change "
                    "outside of the forward."
                )
            _torch.set_version(tensor, self.version)


class CopyBeforeWrite(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Notifies the notes of every tensor that an op reads, and of those that it is about to write."""

    def __init__(self, notes: TensorNotes) -> None:
        super().__init__()
        self._notes = notes

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in argument_tensors((*args, *kwargs.values())):
            self._notes.takes(tensor)
        if _torch.is_higher_order(func):  # these write to nothing
            return func(*args, **kwargs)
        facts = op_facts(func)
        written = facts.written_arguments(args, kwargs)
        written += [args[i] for i in SILENT_WRITERS.get(func._schema.name.rsplit("::", 1)[-1], ()) if i < len(args)]
        for tensor in argument_tensors(written):
            self._notes.before_write(tensor)
        return func(*args, **kwargs)


def _storage_key(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or _torch.is_fake(tensor) or _torch.is_wrapper(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    now = now.to(before.device)
    if torch.equal(now, before):
        return True
    if now.is_floating_point() and now.shape == before.shape:
        return bool(((now == before) | (now.isnan() & before.isnan())).all())
    return False
