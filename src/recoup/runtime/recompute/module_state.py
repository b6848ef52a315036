"""Attributes of modules and argument objects, restored for the replay as the first forward found them.

Flags, hooks, lists, buffers, membrane potentials, caches: the `__dict__` of each module of the region, and of each
object among its arguments (a key-value cache), is noted when the region is entered and restored around the replay;
afterwards the current attributes are put back. Unchanged attributes are not touched, and a module that equals its last
note is not noted again. A rebound attribute costs a reference. A tensor that is changed *in place* has to be copied
beforehand: small ones always are, and the copy is dropped if the forward left them unchanged; larger ones are copied
only where the plan says that they change, and `changed()` names the others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from recoup.runtime.recompute.graphs import cut, whole, without_graph
from recoup.runtime.recompute.rng_state import version_of
from recoup.runtime.recompute.tables import Tables
from recoup.thresholds import MOST_OBJECTS, SMALL_BYTES

_HOOKS = frozenset(k for k in nn.Module().__dict__ if "forward" in k or "backward" in k)
_SKIPPED = (frozenset(nn.Module().__dict__) | {"forward"}) - _HOOKS - {"training", "_buffers"}
_ATOMS = frozenset([int, float, bool, str, bytes, type(None), tuple, torch.dtype, torch.device, torch.Size])
_CONTAINERS = frozenset([list, dict, set, collections.deque, collections.OrderedDict])
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
    types.CodeType,
    types.FrameType,
    property,
)


def walk(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the pairs of `named_modules`; faster, since it is called for every region of every step."""
    found: dict[nn.Module, str] = {}
    stack = [("", module)]
    while stack:
        path, child = stack.pop()
        if child in found:
            continue
        found[child] = path
        prefix = f"{path}." if path else ""
        for name, below in child._modules.items():
            if below is not None:
                stack.append((prefix + name, below))
    return [(path, child) for child, path in found.items()]


class _Tensor:
    """A tensor that an owner holds: its name, its version counter, and its copy if there is one.

    Attributes:
        key: tells it from others of its note.
        tensor: itself, or an alias without its graph.
    """

    __slots__ = ("copy", "key", "leaf", "name", "requires_grad", "tensor", "version")

    def __init__(self, name: str, leaf: str, tensor: torch.Tensor, copied: bool) -> None:
        self.name = name
        self.leaf = leaf
        self.key = id(tensor)
        self.tensor = without_graph(tensor)
        self.version = version_of(tensor)
        self.requires_grad = tensor.requires_grad
        self.copy = tensor.detach().clone() if copied else None

    def again(self) -> torch.Tensor:
        """Returns the tensor for a replay: its value at the start of the forward, detached from its graph."""
        if self.copy is None:
            is_same = not self.requires_grad and not self.tensor.requires_grad
            return self.tensor if is_same else self.tensor.detach().requires_grad_(self.requires_grad)
        if self.requires_grad:
            return self.copy.clone().requires_grad_().clone()  # not a leaf: the forward may change it in place
        return self.copy.clone()


class _Owner:
    """A module or object, its attributes, and copies of its container attributes (None of an empty one)."""

    __slots__ = (
        "_slots",
        "buffers",
        "containers",
        "empty",
        "filled",
        "get",
        "kept",
        "names",
        "order",
        "others",
        "pick",
        "tensors",
        "values",
    )

    def __init__(self, get: Callable[[], Any], names: Iterable[str], kept: dict[str, Any]) -> None:
        self.get = get
        self._slots = _slots_of(type(get()))
        self.order = tuple(names)
        self.names = frozenset(self.order)
        self.kept = kept
        self.values = tuple(kept.values())
        # One call into C instead of one for each attribute: a region asks several times a step.
        self.pick = operator.itemgetter(*kept) if len(kept) > 1 else lambda at: tuple([at[k] for k in kept])
        self.containers: list[tuple[str, Any, Any]] = []
        self.empty: list[Any] = []  # of the containers
        self.filled: list[tuple[Any, Any]] = []
        self.tensors: list[_Tensor] = []
        self.buffers: list[_Tensor] = []
        self.others: list[Any] = []

    def attributes(self) -> MutableMapping[str, Any] | None:
        """Returns the current attributes as a mutable mapping; None if the owner was freed."""
        holder = self.get()
        if holder is None:
            return None
        return _Slots(holder, self._slots) if self._slots else holder.__dict__  # type: ignore[no-any-return]

    def is_as_noted(self, attributes: MutableMapping[str, Any]) -> bool:
        """Whether every attribute is the noted object and every container has the noted items."""
        if tuple(attributes) != self.order and attributes.keys() != self.names:
            return False
        if not all(map(operator.is_, self.pick(attributes), self.values)) or any(self.empty):
            return False
        return not self.filled or all([_holds_same(now, copy) for now, copy in self.filled])

    def stands(self) -> bool:
        """Whether a replay can use the current attributes: all as noted, and no tensor to detach."""
        attributes = self.attributes()
        if attributes is None:
            return True
        if not self.is_as_noted(attributes):
            return False
        held = (*self.tensors, *self.buffers) if self.tensors or self.buffers else ()
        return not any([h.copy is not None or h.requires_grad or h.tensor.requires_grad for h in held])

    def may_stand(self) -> bool:
        """Whether the note may outlive its step: it holds no tensor, not even in a container."""
        return not self.tensors and not self.filled and not self._slots

    def put_back(self, attributes: MutableMapping[str, Any]) -> None:
        """Restores attributes and containers to the note."""
        _put(attributes, self.kept)
        for container in self.empty:
            container.clear()
        for container, copy in self.filled:
            if not _holds_same(container, copy):
                container.clear()
                container.extend(copy) if isinstance(copy, (list, collections.deque)) else container.update(copy)


class AttributeState:
    """Snapshot of the attributes of some modules and objects.

    Args:
        modules: (path, module) pairs, as `walk` returns them.
        objects: arguments of unknown type; those with a `__dict__` are noted, recursively.
        written: paths of tensors that the forward is known to change although they are large, or although their
            version counter does not tell.
        notes: notes of earlier calls by module path; valid ones are reused, others are replaced.

    Attributes:
        others: objects of unknown type among the modules' attributes.
    """

    __slots__ = ("_cut", "_owners", "_written", "others")

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        objects: Iterable[Any] = (),
        written: Iterable[str] = (),
        notes: dict[str, Any] | None = None,
    ) -> None:
        self.others: list[Any] = []
        self._written = frozenset(written)
        self._owners: list[_Owner] = []
        self._cut: dict[int, Any] = {}  # copies of containers without their graphs, by id
        notes = {} if notes is None else notes
        for path, module in modules:
            attributes = module.__dict__
            owner = notes.get(path)
            if owner is not None and owner.get() is module and owner.is_as_noted(attributes):
                self._owners.append(owner)
            else:
                kept = {k: v for k, v in attributes.items() if k not in _SKIPPED}
                owner = self._add(path, weakref.ref(module), attributes, kept)
                if owner.may_stand():
                    notes[path] = owner
                else:
                    notes.pop(path, None)
            self.others += owner.others
        if objects:
            self._add_objects(objects)
        self._cut = {}

    def _add(self, path: str, get: Callable[[], Any], names: Iterable[str], kept: dict[str, Any]) -> _Owner:
        owner = _Owner(get, names, kept)
        for key, value in kept.items():
            kind = type(value)
            if kind in _ATOMS:
                continue
            if kind in _CONTAINERS:
                if key == "_buffers":
                    owner.buffers += [self._note(path, leaf, b) for leaf, b in value.items() if b is not None]
                copy = self._cut.get(id(value)) or (value.copy() if value else None)
                if copy is not None and (id(value) in self._cut or cut(copy)):
                    self._cut[id(value)] = copy  # nor is the container held, which has the graphs
                    value = kept[key] = copy
                owner.containers.append((key, value, copy))
                owner.empty.append(value) if copy is None else owner.filled.append((value, copy))
            elif isinstance(value, torch.Tensor):
                owner.tensors.append(self._note(path, key, value))
                kept[key] = owner.tensors[-1].tensor
            else:
                owner.others.append(value)
        if owner.tensors or owner.filled:
            owner.values = tuple(kept.values())
        self._owners.append(owner)
        return owner

    def _add_objects(self, objects: Iterable[Any]) -> None:
        seen: set[int] = set()
        queue = [("its argument", o) for o in objects]
        while queue and len(seen) < MOST_OBJECTS:
            path, item = queue.pop()
            if id(item) in seen or not _is_state(item):
                continue
            seen.add(id(item))
            kept = dict(_attributes_of(item))
            owner = self._add(path, lambda item=item: item, kept, kept)  # type: ignore[misc]
            others = owner.others.copy()
            for _, value, _copy in owner.containers:
                others += value.values() if isinstance(value, dict) else value
            queue += [(f"{path}.{type(o).__name__}", o) for o in others]

    def _note(self, path: str, leaf: str, tensor: torch.Tensor) -> _Tensor:
        name = f"{path}.{leaf}" if path else leaf
        small = tensor.layout is torch.strided and tensor.nbytes <= SMALL_BYTES
        return _Tensor(name, leaf, tensor, small or name in self._written)

    def settle(self) -> None:
        """Drops the copies of tensors that the forward left unchanged; call it after the forward."""
        for owner in self._owners:
            for held in (*owner.tensors, *owner.buffers) if owner.tensors or owner.buffers else ():
                if version_of(held.tensor) == held.version and held.name not in self._written:
                    held.copy = None

    def changed(self) -> str:
        """Returns the name of a tensor without a copy that was changed in place since; "" if there is none."""
        for owner in self._owners:
            for held in (*owner.tensors, *owner.buffers) if owner.tensors or owner.buffers else ():
                if held.copy is None and version_of(held.tensor) != held.version:
                    return held.name
        return ""

    def tables(self, modules: Sequence[tuple[str, nn.Module]]) -> Tables | None:
        """Returns what tells whether the snapshot still holds; None if it is of one step alone."""
        if not all([owner.may_stand() for owner in self._owners]):
            return None
        return Tables(modules, [container for owner in self._owners for container in owner.empty])

    def stands(self) -> bool:
        """Whether a replay can use the current attributes as they are."""
        return all([owner.stands() for owner in self._owners])

    def put_back(self) -> None:
        """Restores what a replay has changed since the snapshot stood."""
        for owner in self._owners:
            attributes = owner.attributes()
            if attributes is not None and not owner.is_as_noted(attributes):
                owner.put_back(attributes)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Restores the noted attributes inside of the block, and the current ones at its end."""
        if self.stands():
            try:
                yield
            finally:
                self.put_back()
            return
        entries = self._entries()  # copies are made before anything is changed: allocation may fail
        present = [(at, {k: v for k, v in at.items() if k not in _SKIPPED}) for at, _ in entries]
        try:
            for attributes, values in entries:
                _put(attributes, values)
            yield
        finally:
            for attributes, now in present:
                _put(attributes, now)

    def _entries(self) -> list[tuple[MutableMapping[str, Any], dict[str, Any]]]:
        """Returns (current attributes, attributes for the replay) of each owner that is alive."""
        entries = []
        shared: dict[int, Any] = {}  # lists and tensors that two modules share stay shared
        for owner in self._owners:
            attributes = owner.attributes()
            if attributes is None:
                continue
            values = dict(owner.kept)
            for key, container, copy in owner.containers:
                if id(container) not in shared:
                    shared[id(container)] = type(container)() if copy is None else whole(copy.copy())
                values[key] = shared[id(container)]
            for into, tensors in ((values, owner.tensors), (values.get("_buffers", {}), owner.buffers)):
                for held in tensors:
                    if held.key not in shared:
                        shared[held.key] = held.again()
                    into[held.leaf] = shared[held.key]
            entries.append((attributes, values))
        return entries


def _holds_same(now: Any, copy: Any) -> bool:
    """Whether a container and a copy hold the same objects, in the same order if it is ordered."""
    if len(now) != len(copy):
        return False
    if isinstance(copy, set):
        return set(map(id, now)) == set(map(id, copy))
    is_same = all(map(operator.is_, now, copy))
    return is_same and (not isinstance(copy, dict) or all(map(operator.is_, now.values(), copy.values())))


def _put(attributes: MutableMapping[str, Any], values: dict[str, Any]) -> None:
    for key in [k for k in attributes if k not in values and k not in _SKIPPED]:
        del attributes[key]
    attributes.update(values)


class _Slots(MutableMapping[str, Any]):
    """The attributes of an object whose class has `__slots__`, those in its `__dict__` among them."""

    def __init__(self, item: Any, names: tuple[str, ...]) -> None:
        self._item = item
        self._names = names

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._item, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._item, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._item, name)

    def __iter__(self) -> Iterator[str]:
        yield from getattr(self._item, "__dict__", ())
        for name in self._names:
            if name in self:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _attributes_of(item: Any) -> MutableMapping[str, Any]:
    """Returns a module's or object's attributes, to be read and changed."""
    names = _slots_of(type(item))
    return _Slots(item, names) if names else item.__dict__


def _slots_of(kind: type[Any]) -> tuple[str, ...]:
    members = (k for base in kind.__mro__ for k, v in vars(base).items() if type(v) is types.MemberDescriptorType)
    return tuple(members) if any("__slots__" in vars(base) for base in kind.__mro__[:-1]) else ()


def _is_state(item: Any) -> bool:
    """Whether an object may keep state for a forward: it has attributes, and is no module, class or function."""
    if isinstance(item, (nn.Module, torch.Tensor, type, types.ModuleType, *_FUNCTIONS)):
        return False
    return type(getattr(item, "__dict__", None)) is dict or bool(_slots_of(type(item)))
