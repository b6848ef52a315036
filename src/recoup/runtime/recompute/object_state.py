"""State of a region outside of its modules' attributes, restored for the replay as the first forward found it.

Counters in plain objects, dicts in dicts, tensors in lists, unregistered modules, closures of hooks, class attributes,
globals: whatever `_reachable` finds from the region's modules beyond what `module_state.py` notes. The search takes
milliseconds, so it is repeated only when a container has changed. A note shares the copies of the last one where
nothing changed, so that constant state takes no memory.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._reachable import Reached, slots_of
from recoup.errors import ReplayError
from recoup.runtime.recompute.graphs import cut, whole, without_graph
from recoup.runtime.recompute.rng_state import StreamState, version_of
from recoup.runtime.recompute.spot_check import Samples
from recoup.runtime.recompute.tables import Standing
from recoup.thresholds import SMALL_BYTES

_ABSENT = object()
_CONTAINERS = (list, dict, set, tuple, collections.deque)
_INTERNAL = tuple(k for k, v in nn.Module().__dict__.items() if isinstance(v, (dict, set)))  # tables and hooks


class _Place:
    """A place that holds values: how to read and replace them, and how to tell that they are those of an earlier copy.

    `holds`: for a place that is compared without being read into a copy first.
    """

    __slots__ = ("holds", "last", "name", "put", "read")

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        put: Callable[[Any], None],
        holds: Callable[[Any], bool] | None = None,
    ) -> None:
        self.name = name
        self.read = read
        self.put = put
        self.holds: Callable[[Any], bool] = holds or (lambda copy: is_same(read(), copy))
        self.last = read()
        cut(self.last)

    def now(self) -> Any:
        """Returns a copy of the contents without graphs; the same object as last time if they are unchanged."""
        if not self.holds(self.last):
            self.last = self.read()
            cut(self.last)
        return self.last


class Places:
    """The places where a region's modules keep state besides their attributes."""

    def __init__(self) -> None:
        self._found: list[_Place] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._streams: list[Any] = []
        self._key: list[int] | None = None
        self.notes: dict[str, Any] = {}  # by module path, see `AttributeState`
        self.standing: Standing | None = None
        self._samples = Samples(())

    def samples_of(self, weights: Sequence[torch.Tensor]) -> Samples:
        """Returns the reader of the region's parameters; the last step's while the parameters are the same."""
        if not self._samples.are_of(weights):
            self._samples = Samples(weights)
        return self._samples

    def note(self, modules: Sequence[tuple[str, nn.Module]], others: Sequence[Any]) -> ObjectState:
        """Returns a snapshot of the state.

        Args:
            modules: (path, module) pairs of the region, its own module first.
            others: objects of unknown type among their attributes.
        """
        key = [id(m) for _, m in modules] + [id(o) for o in others]
        if key != self._key:
            self._look(dict(modules))
            self._key = key
        return ObjectState(self._found, self._tensors, self._streams, self._forget)

    def note_again(self) -> ObjectState | None:
        """Returns a snapshot for the modules of the last one; None if they have to be searched again."""
        if self._key is None:
            return None
        return ObjectState(self._found, self._tensors, self._streams, self._forget)

    def _forget(self) -> None:
        self._key = None

    def _look(self, modules: dict[str, nn.Module]) -> None:
        found = Reached(modules, around=list(modules.values())[:1])
        own: set[int] = set()  # ids of objects that `AttributeState` notes
        for module in modules.values():
            attributes = module.__dict__
            held = [*attributes.values(), *module._parameters.values(), *module._buffers.values()]
            own.update(id(h) for h in held if not isinstance(h, _CONTAINERS))
            own.update(id(attributes.get(k)) for k in _INTERNAL)
            own.add(id(attributes))
        self._found = [_container(n, c) for n, c in found.containers if id(c) not in own]
        self._found += [_slotted(n, o) for n, o in found.slotted]
        self._found += [_class(n, k) for n, k in found.classes]
        self._found += [_cell(n, c) for n, c in found.cells]
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for _, scope, key in found.bindings:
            names.setdefault(id(scope), (scope, []))[1].append(key)
        self._found += [_bindings(scope, keys) for scope, keys in names.values()]
        self._found += [_array(n, a) for n, a in found.arrays if a.nbytes <= SMALL_BYTES and a.flags.writeable]
        self._found += [_raw(n, r) for n, r in found.raw]
        self._tensors = [
            (n, without_graph(t)) for n, t in found.tensors if id(t) not in own and t.layout is torch.strided
        ]
        self._streams = [s for _, s in found.streams if id(s) not in own]


class ObjectState:
    """Snapshot of the contents of some places."""

    __slots__ = ("_forget", "_held", "_only_read", "_streams", "_tensors")

    def __init__(
        self,
        places: list[_Place],
        tensors: list[tuple[str, torch.Tensor]],
        streams: list[Any],
        forget: Callable[[], None],
    ) -> None:
        self._held = [(place, place.now()) for place in places]
        self._tensors = [(name, t, version_of(t), _copy(t)) for name, t in tensors]
        self._streams = StreamState(streams)
        self._only_read: list[tuple[str, torch.Tensor, int]] = []
        self._forget = forget

    def settle(self) -> None:
        """Schedules another search at the next call if the forward changed a place; call it after the forward."""
        if not self._is_held():
            self._forget()
        if self._tensors:
            self._only_read = [(n, t, v) for n, t, v, _ in self._tensors if version_of(t) == v]

    def _is_held(self) -> bool:
        return all([place.holds(held) for place, held in self._held])

    def changed(self) -> str:
        """Returns the name of a tensor without a copy that was changed in place since; "" if there is none."""
        return next((n for n, t, v, copy in self._tensors if copy is None and version_of(t) != v), "")

    def stands(self) -> bool:
        """Whether a replay can use the current contents as they are."""
        return not self._tensors and not self._streams and self._is_held()

    def put_back(self) -> None:
        """Restores what a replay has changed since the snapshot stood."""
        for place, held in self._held:
            if not place.holds(held):
                place.put(whole(held))

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Restores the noted contents inside of the block, and the current ones at its end.

        Raises:
            ReplayError: if a tensor that the forward only read was changed in place since; autograd refuses that too.
        """
        written = next((n for n, t, v in self._only_read if version_of(t) != v), None)
        if written is not None:
            raise ReplayError(
                f"Region: the tensor {written}, which its forward reads and which is no argument, was changed in place "
                "between forward and backward. Clone it before changing it, or change it after backward.",
                code="E201",
            )
        present = [(place, place.read()) for place, _ in self._held]
        tensors = [(t, copy, _copy(t), version_of(t)) for _, t, _, copy in self._tensors if copy is not None]
        try:
            for (place, held), (_, now) in zip(self._held, present, strict=True):
                if not is_same(now, held):
                    place.put(whole(held))
            for tensor, copy, _, _ in tensors:
                _put_values(tensor, copy)
            with self._streams.replayed():
                yield
        finally:
            for place, now in present:
                if not place.holds(now):
                    place.put(now)
            for tensor, _, values, version in tensors:
                _put_values(tensor, values)
                _torch.set_version(tensor, version)


def is_same(one: Any, other: Any) -> bool:
    """Whether two copies hold the same objects, or equal numbers."""
    if type(one) is dict:
        return one.keys() == other.keys() and all(map(operator.is_, one.values(), map(other.__getitem__, one)))
    if type(one) is list:
        return len(one) == len(other) and all(map(operator.is_, one, other))
    return one is other or (type(one) in (set, bytes) and bool(one == other))


def _table_holds(table: Mapping[str, Any], copy: dict[str, Any]) -> bool:
    """Whether a dictionary holds the same objects as a copy, most often in the same order."""
    if len(table) != len(copy):
        return False
    if all(map(operator.is_, table, copy)) and all(map(operator.is_, table.values(), copy.values())):
        return True
    return is_same(dict(table), copy)


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy of a small tensor; None of a large one. A real tensor's is made below every dispatch mode."""
    if tensor.nbytes > SMALL_BYTES or tensor.device.type == "meta":
        return None
    if _torch.is_fake(tensor):
        return tensor.detach().clone()
    with _torch.without_dispatch_modes(), torch.no_grad():
        return tensor.detach().clone()


def _put_values(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    if values is not None and not _torch.is_fake(tensor):
        with _torch.without_dispatch_modes(), torch.no_grad():
            tensor.data.copy_(values)


def _container(name: str, container: Any) -> _Place:
    if isinstance(container, dict):
        is_plain = type(container) is dict or type(container) is collections.OrderedDict
        holds = functools.partial(_table_holds, container) if is_plain else None
        return _Place(name, lambda: dict(dict.items(container)), lambda v: _fill(container, v), holds)
    if isinstance(container, set):
        return _Place(name, lambda: set(container), lambda v: _fill_set(container, v))
    return _Place(name, lambda: list(container), lambda v: _fill(container, v))


def _fill_set(container: set[Any], held: set[Any]) -> None:
    set.clear(container)
    set.update(container, held)


def _fill(container: Any, held: Any) -> None:
    kind: Any = next(k for k in type(container).__mro__ if k.__module__ in ("builtins", "collections"))
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in held.items():
            kind.__setitem__(container, key, value) if kind is not dict else dict.__setitem__(container, key, value)
    else:
        kind.extend(container, held)


def _slotted(name: str, item: Any) -> _Place:
    names = slots_of(type(item))

    def put(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if value is not _ABSENT:
                object.__setattr__(item, key, value)
            elif hasattr(item, key):
                object.__delattr__(item, key)

    return _Place(name, lambda: {key: getattr(item, key, _ABSENT) for key in names}, put)


def _class(name: str, kind: type) -> _Place:
    def put(values: dict[str, Any]) -> None:
        now = vars(kind)
        for key in [k for k in now if k not in values and not k.startswith("__")]:
            type.__delattr__(kind, key)
        for key, value in values.items():
            if now.get(key, _ABSENT) is not value and not key.startswith("__"):
                type.__setattr__(kind, key, value)

    return _Place(name, lambda: dict(vars(kind)), put, functools.partial(_table_holds, vars(kind)))


def _cell(name: str, cell: Any) -> _Place:
    def read() -> Any:
        try:
            return [cell.cell_contents]
        except ValueError:
            return []

    def put(values: Any) -> None:
        if values:
            cell.cell_contents = values[0]

    return _Place(name, read, put)


def _bindings(scope: dict[str, Any], names: list[str]) -> _Place:
    def read() -> list[Any]:
        return list(map(scope.get, names, itertools.repeat(_ABSENT)))

    def put(values: list[Any]) -> None:
        for name, now, value in zip(names, read(), values, strict=True):
            if value is _ABSENT:
                scope.pop(name, None)
            elif value is not now:
                scope[name] = value

    count = _torch.dict_version()
    last: tuple[list[Any] | None, int] = None, 0  # a copy that held, and the count of changes then

    def holds(copy: list[Any]) -> bool:
        nonlocal last
        version = -1 if count is None else count(scope)
        if last[0] is copy and last[1] == version >= 0:
            return True
        is_held = all(map(operator.is_, map(scope.get, names, itertools.repeat(_ABSENT)), copy))
        last = copy if is_held else None, version
        return is_held

    return _Place("globals", read, put, holds)


def _array(name: str, array: Any) -> _Place:
    def put(values: bytes) -> None:
        array[...] = type(array)(array.shape, array.dtype, values)

    return _Place(name, array.tobytes, put)


def _raw(name: str, raw: Any) -> _Place:
    def put(values: bytes) -> None:
        raw[:] = type(raw)(values) if isinstance(raw, bytearray) else type(raw)(raw.typecode, values)

    return _Place(name, lambda: bytes(raw), put)
