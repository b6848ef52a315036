"""Everything that a training step can get at from its model, loss, batch and hooks, and may change.

Found by looking where Python keeps things: attributes and slots, containers, closure cells, defaults, bound objects,
`functools.partial`, the globals that a user's functions name, the attributes of a user's classes, hooks on modules and
tensors. Library code is taken to keep its state in objects: its globals and classes are left alone, and so are
threads, locks, loggers, data loaders and recoup's own objects.
"""

from __future__ import annotations

import array
import collections
import dis
import functools
import io
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_ATOMS = frozenset(
    [int, float, complex, bool, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size]
)
_CONTAINERS = (list, dict, set, collections.deque)
_BYTES = (bytearray, array.array)
_ONCE_ONLY = (types.GeneratorType, map, filter, zip, enumerate, reversed)
_OPAQUE = (
    "torch.utils",
    "deepspeed",
    "torch.distributed",
    "torch.fx",
    "torch.jit",
    "torch.profiler",
    "torch._",
    "recoup",
)
_HOLDERS = ("collections", "types", "argparse", "functools", "contextvars")  # of the standard library, with state
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Reached:
    """The objects that were found, each with a name that says where.

    Attributes:
        tensors: leaf and other tensors.
        containers: lists, dicts (attribute dictionaries among them), sets, deques.
        slotted: objects with `__slots__`.
        classes: a user's own.
        cells: of closures.
        bindings: (globals, name) that a user's function names.
        arrays: numpy's.
        raw: `bytearray`s and arrays.
        streams: random number generators.
        once_only: generators, files and their like, which cannot be put back, with their holder and key in it.

    Args:
        roots: where to look from, by name.
        around: of a module that these are part of, only attributes are looked at.
        follows_hooks: what tensors' hooks reach is found, too, an optimizer that steps in backward: no forward reads
            it by them.
    """

    def __init__(
        self, roots: Mapping[str, Any], *, around: Iterable[nn.Module] = (), follows_hooks: bool = False
    ) -> None:
        self._follows_hooks = follows_hooks
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.containers: list[tuple[str, Any]] = []
        self.slotted: list[tuple[str, Any]] = []
        self.classes: list[tuple[str, type]] = []
        self.cells: list[tuple[str, types.CellType]] = []
        self.bindings: list[tuple[str, dict[str, Any], str]] = []
        self.arrays: list[tuple[str, Any]] = []
        self.raw: list[tuple[str, Any]] = []
        self.streams: list[tuple[str, Any]] = []
        self.once_only: list[tuple[str, Any, Any, Any]] = []
        self._seen: dict[int, Any] = {}
        self._around = frozenset(map(id, around))
        self._bound: set[tuple[int, str]] = set()
        self._owned: dict[str, bool] = {}
        self._slots: dict[type, Any] = {}  # of classes seen; None: its objects are left alone
        todo = collections.deque(roots.items())
        while todo:
            name, item = todo.popleft()
            if type(item) in _ATOMS or id(item) in self._seen:
                continue
            self._seen[id(item)] = item
            todo.extend(self._look(name, item))

    def __contains__(self, item: Any) -> bool:
        return id(item) in self._seen

    def modules(self) -> list[nn.Module]:
        """Returns the `nn.Module`s among the objects, in the order they were found."""
        return [item for item in self._seen.values() if isinstance(item, nn.Module)]

    def _look(self, name: str, item: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(item, torch.Tensor):
            yield from self._look_at_tensor(name, item)
        elif isinstance(item, _CONTAINERS):
            yield from self._look_into(name, item)
        elif isinstance(item, (tuple, frozenset)):
            for i, value in enumerate(item):
                yield f"{name}[{i}]", value
        elif isinstance(item, type):
            yield from self._look_at_class(name, item)
        elif isinstance(item, types.FunctionType):
            yield from self._look_at_function(name, item)
        elif isinstance(item, (types.MethodType, types.BuiltinMethodType)):
            if not isinstance(item.__self__, (types.ModuleType, type(None))):
                yield name, item.__self__
            yield name, getattr(item, "__func__", None)
        elif isinstance(item, functools.partial):
            yield from ((name, part) for part in (item.func, item.args, item.keywords))
        elif _is_stream(item):
            self.streams.append((name, item))
        elif isinstance(item, _BYTES):
            self.raw.append((name, item))
        elif type(item).__module__ == "numpy" and hasattr(item, "__array_interface__") and hasattr(item, "flags"):
            if not isinstance(item, _numpy_scalar()):
                self.arrays.append((name, item))
        else:
            kind = type(item)
            slots = self._slots.get(kind, self)
            if slots is self:
                slots = self._slots[kind] = None if _is_opaque(kind) else slots_of(kind)
            if slots is not None:
                yield from self._look_at_object(name, item, slots)

    def _look_at_tensor(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        if hasattr(tensor, "ds_id"):  # ZeRO-3 owns it, and hangs its optimizer on it
            return
        self.tensors.append((name, tensor))
        for table in _HOOKS:
            hooks = getattr(tensor, table, None)
            if self._follows_hooks:
                yield f"{name}.{table}", hooks
            elif hooks is not None:
                self.containers.append((f"{name}.{table}", hooks))
        if getattr(tensor, "__dict__", None):
            yield name, tensor.__dict__

    def _look_into(self, name: str, container: Any) -> Iterator[tuple[str, Any]]:
        self.containers.append((name, container))
        if isinstance(container, dict):
            owner, _, table = name.rpartition(".")
            for key, value in list(dict.items(container)):
                if type(value) not in _ATOMS:
                    inner = f"{name}.{key}" if type(key) is str and key.isidentifier() else f"{name}[{_short(key)}]"
                    if table in _TABLES:
                        inner = f"{owner}.{key}"
                    yield self._noting_once_only(inner, value, container, key)
                if type(key) not in _ATOMS:
                    yield f"{name}'s key", key
        elif isinstance(container, list):
            for i, value in enumerate(container):
                if type(value) not in _ATOMS:
                    yield self._noting_once_only(f"{name}[{i}]", value, container, i)
        else:
            yield from ((f"{name}[...]", value) for value in list(container) if type(value) not in _ATOMS)
        if isinstance(container, collections.defaultdict):
            yield name, container.default_factory
        if type(container).__module__ not in ("builtins", "collections"):
            yield name, getattr(container, "__dict__", None)

    def _noting_once_only(self, name: str, value: Any, holder: Any, key: Any) -> tuple[str, Any]:
        is_file = isinstance(value, io.IOBase) and value not in (sys.stdout, sys.stderr, sys.stdin)
        if is_file or isinstance(value, _ONCE_ONLY) or type(value).__module__ == "itertools":
            self.once_only.append((name, holder, key, value))
        return name, value

    def _look_at_function(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self.cells.append((variable, cell))
                yield self._noting_once_only(variable, _contents(cell), cell, None)
        yield f"{name}.__defaults__", function.__defaults__
        yield f"{name}.__kwdefaults__", function.__kwdefaults__
        if function.__dict__:
            yield name, function.__dict__
        if self._is_users(function.__globals__.get("__name__", "")):
            names, attributes = names_in(function.__code__)
            yield from self._look_at_names(names, attributes, function.__globals__)

    def _look_at_names(
        self, names: frozenset[str], attributes: frozenset[str], scope: dict[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        for name in sorted(names):
            if (id(scope), name) in self._bound:
                continue
            self._bound.add((id(scope), name))
            self.bindings.append((name, scope, name))
            value = scope.get(name)
            if isinstance(value, types.ModuleType):
                if value.__dict__ is not scope and self._is_users(value.__name__):
                    yield from self._look_at_names(attributes & value.__dict__.keys(), attributes, value.__dict__)
            elif type(value) not in _ATOMS:
                yield self._noting_once_only(name, value, scope, name)

    def _look_at_class(self, name: str, kind: type) -> Iterator[tuple[str, Any]]:
        if not self._is_users(kind.__module__):
            return
        self.classes.append((name, kind))
        for key, value in list(vars(kind).items()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = (value.fget, value.fset)
            if type(value) not in _ATOMS and key not in ("__dict__", "__weakref__", "__doc__"):
                yield f"{name}.{key}", value
        yield from ((base.__name__, base) for base in kind.__bases__)

    def _look_at_object(self, name: str, item: Any, slots: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        attributes = getattr(item, "__dict__", None)
        if self._around and isinstance(item, nn.Module) and any(id(m) in self._around for m in item.modules()):
            assert attributes is not None
            for table in _TABLES:
                self._seen[id(attributes[table])] = attributes[table]
        if type(attributes) is dict:
            yield name, attributes
        if slots:
            self.slotted.append((name, item))
            for slot in slots:
                yield f"{name}.{slot}", getattr(item, slot, None)
        yield type(item).__name__, type(item)

    def _is_users(self, module_name: str) -> bool:
        """Whether a module is the user's own code: neither the standard library's nor an installed package's."""
        known = self._owned.get(module_name)
        if known is None:
            known = self._owned[module_name] = _is_users(module_name)
        return known


def roots_of(model: nn.Module, batch: Any = None, loss: Any = None, others: Any = ()) -> dict[str, Any]:
    """Returns where to look from: the model, what a step is given, and hooks that are registered for all modules."""
    modules = vars(nn.modules.module)
    hooks = {name: value for name, value in modules.items() if name.startswith("_global_") and isinstance(value, dict)}
    return {"model": model, "loss": loss, "batch": batch, "optimizer": others, **hooks}


def slots_of(kind: type) -> tuple[str, ...]:
    """Returns the names that a class's `__slots__` give to its objects."""
    return tuple(n for c in kind.__mro__ for n, v in vars(c).items() if isinstance(v, types.MemberDescriptorType))


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the global names in a function's code, and those of attributes; of functions inside of it, too."""
    names: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_NAME" or "GLOBAL" in instruction.opname:
            names.add(instruction.argval)
        elif instruction.opcode in dis.hasname:
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for found, inside in zip((names, attributes), names_in(constant), strict=True):
                found |= inside
    return frozenset(names), frozenset(attributes)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _short(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__


def _is_stream(item: Any) -> bool:
    return isinstance(item, (torch.Generator, random.Random)) or type(item).__module__.startswith("numpy.random")


def _numpy_scalar() -> type:
    return sys.modules["numpy"].generic  # type: ignore[no-any-return]


def _is_opaque(kind: type) -> bool:
    """Whether objects of a class are left alone: the standard library's but plain holders, torch's machinery."""
    name = kind.__module__
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        return name.partition(".")[0] not in _HOLDERS
    if issubclass(kind, nn.Module) and name.startswith("recoup"):  # stands around a user's module
        return False
    return name.startswith(_OPAQUE)


def _is_users(module_name: str) -> bool:
    top = module_name.partition(".")[0]
    if top == "__main__":
        return True
    if top in sys.stdlib_module_names or top in ("torch", "numpy", "recoup"):
        return False
    path = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return not path.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[kind] for kind in ("stdlib", "purelib", "platlib"))
