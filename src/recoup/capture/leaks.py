"""Fake tensors that outlive a capture: found, and taken from whoever keeps them.

A forward may keep what it computes outside of the model: an `lru_cache`, a global dict, a class attribute, a rotary
object, a list of activations. After a capture these would hold fake tensors, and the next real step would compute with
them. `Snapshot` puts back what it knows of; here is what it does not know of. Python's collector tells which fake
tensors are left and who refers to them. A class, a module's globals, a container or an object in them get back what
they held before; from anything else the fake tensors are removed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from recoup import _torch
from recoup.capture.tracker import Tracker
from recoup.errors import InternalError

_ROUNDS = 6
_DEPTH = 3
_MAX_ITEMS = 4096
_MISSING = object()
_ATOMS = frozenset([int, float, bool, str, bytes, type(None), torch.dtype, torch.device, types.ModuleType, property])
_CONTAINERS = frozenset([dict, list, set, collections.deque, collections.OrderedDict, collections.defaultdict])
_CLIMBED = (tuple, frozenset, functools.partial, types.MethodType, types.BuiltinMethodType)
_LIBRARIES = frozenset({"torch", "builtins", "collections", "functools", "recoup", "typing", "numpy", "abc"})

T = TypeVar("T")


class Kept:
    """What classes, globals and containers near a model's forward held before a capture: the first three levels.

    Args:
        functions: what runs in the step besides the model's modules: the loss.
    """

    def __init__(self, model: nn.Module, functions: Iterable[Any] = ()) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # by id: a class, container, cell or `__dict__`, and what it held
        for kind in dict.fromkeys(type(module) for module in model.modules()):
            for base in kind.__mro__:
                self._note_class(base, 0)
        for module in model.modules():
            for hook in [h for k, v in vars(module).items() if k.endswith("_hooks") and v for h in v.values()]:
                self._note(hook, 0)
        for function in functions:
            self._note(function, 0)

    def before(self, holder: Any, key: Any) -> Any:
        """Returns what `holder` held under `key`, `_MISSING` if nothing or if that is not known."""
        held, items = self._held.get(id(holder), (None, None))
        return items.get(key, _MISSING) if held is holder and isinstance(items, dict) else _MISSING

    def items_before(self, holder: Any) -> Any:
        """Returns what a list, set or deque held; None if that is not known."""
        held, items = self._held.get(id(holder), (None, None))
        return items if held is holder else None

    def _note(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _ATOMS or depth > _DEPTH or id(value) in self._held:
            return
        if kind in _CONTAINERS:
            self._held[id(value)] = value, value.copy()
            for item in list(value.values() if isinstance(value, dict) else value)[:_MAX_ITEMS]:
                self._note(item, depth + 1)
        elif kind is types.FunctionType:
            if depth == 0:
                self._note_function(value)
        elif kind in (classmethod, staticmethod, functools._lru_cache_wrapper):  # type: ignore[attr-defined]
            self._note(value.__wrapped__, depth)
        elif kind is types.MethodType:
            self._note(value.__self__, depth)
            self._note(value.__func__, depth)
        elif kind is functools.partial:
            for item in (value.func, *value.args, *value.keywords.values()):
                self._note(item, depth)
        elif isinstance(value, type):
            self._note_class(value, depth)
        elif not isinstance(value, (types.ModuleType, torch.Tensor, nn.Module)) and not _is_library(kind.__module__):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                self._held[id(value)] = value, None
                self._note(attributes, depth)
                self._note_class(kind, depth)

    def _note_class(self, kind: type[Any], depth: int) -> None:
        if id(kind) in self._held or _is_library(kind.__module__):
            return
        members = dict(vars(kind))
        self._held[id(kind)] = kind, members
        for member in members.values():
            self._note(member, depth)

    def _note_function(self, function: types.FunctionType) -> None:
        self._held[id(function)] = function, None
        if _is_library(function.__module__ or ""):
            return
        self._note(function.__globals__, 1)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing in it yet
                self._held[id(cell)] = cell, {"cell_contents": cell.cell_contents}
                self._note(cell.cell_contents, 1)


def run_on_fakes(body: Callable[[Any, list[Tracker]], T], kept: Kept, *, is_thorough: bool) -> tuple[T, list[str]]:
    """Runs `body` with a new fake mode, and leaves no fake tensor behind, whatever happens.

    Args:
        body: is given the mode, and a list to which it adds the trackers that watch its ops.
        is_thorough: all objects are looked at, and not only if a tracker has seen a storage that is still alive.

    Returns:
        Its result, and in words who kept fake tensors.

    Raises:
        InternalError: if a fake tensor is held where nothing can take it away.
    """
    mode = _torch.fake_tensor_mode()
    trackers: list[Tracker] = []
    try:
        result = body(mode, trackers)
    except BaseException as error:
        _forget_locals(error)
        _take_back(mode, kept, is_strict=False)
        raise
    is_suspect = is_thorough or any(t.holds_fakes() for t in trackers)
    return result, _take_back(mode, kept, is_strict=True) if is_suspect else []


def _forget_locals(error: BaseException | None) -> None:
    """Has the frames of an error, which is on its way to the user, let go of their variables."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _take_back(mode: Any, kept: Kept, *, is_strict: bool) -> list[str]:
    """Takes the mode's fake tensors from all who hold them; returns in words who did."""
    found: list[str] = []
    if not _fakes_of(mode):
        return found
    gc.collect()
    for _ in range(_ROUNDS):  # who held the first may have been held by others
        left = _fakes_of(mode)
        if not left:
            return found
        found += _release(left, kept)
        del left
        gc.collect()
    if is_strict and _fakes_of(mode):
        raise InternalError(
            f"{len(_fakes_of(mode))} fake tensors of a capture are still held, and not by anything they can be taken "
            "from. Please report the model; restart Python before training on. (recoup.capture.leaks)"
        )
    return found


def _fakes_of(mode: Any) -> list[torch.Tensor]:
    return _torch.fakes_among(gc.get_objects(), mode)


def _release(fakes: list[torch.Tensor], kept: Kept) -> list[str]:
    found: list[str] = []
    mine = {id(f) for f in fakes}
    for other in gc.get_objects():  # what the autograd engine holds is not seen by the collector
        if issubclass(type(other), torch.Tensor) and id(other) not in mine and _has_grad(other, mine):
            other.grad = None
            found.append(f"the gradient of a tensor {list(other.shape)}")
    level: list[Any] = list(fakes)
    climbed: set[int] = set()
    while level:
        ids = {id(o) for o in level}
        ours = {id(level), id(fakes)}
        above: list[Any] = []
        for holder in gc.get_referrers(*level):
            if id(holder) in ours or isinstance(holder, types.FrameType):
                continue
            if isinstance(holder, _CLIMBED):
                if id(holder) not in climbed:
                    climbed.add(id(holder))
                    above.append(holder)
            else:
                found += _remove(holder, ids, kept)
        level = above
    return found


def _has_grad(tensor: torch.Tensor, fakes: set[int]) -> bool:
    try:
        return tensor.is_leaf and tensor.grad is not None and id(tensor.grad) in fakes
    except RuntimeError:  # a tensor of another library, or one that is no longer to be asked
        return False


def _remove(holder: Any, ids: set[int], kept: Kept) -> Iterator[str]:
    """Takes objects from one that holds them; yields in words which it was."""
    if type(holder) is functools._lru_cache_wrapper:  # type: ignore[attr-defined]
        holder.cache_clear()
        yield f"the cache of `{getattr(holder, '__qualname__', holder)}`"
    elif isinstance(holder, dict):
        owner = _owner_of(holder)
        for key in [k for k, v in holder.items() if id(v) in ids or id(k) in ids]:
            _put_back(holder, owner, key, kept)
            yield f"{_name_of(owner)}[{key!r}]" if owner is None else f"`{_name_of(owner)}.{key}`"
    elif isinstance(holder, (list, collections.deque)):
        before = kept.items_before(holder)
        items = [o for o in holder if id(o) not in ids] if before is None else list(before)
        holder.clear()
        holder.extend(items)
        yield "a list"
    elif isinstance(holder, set):
        for item in [o for o in holder if id(o) in ids]:
            holder.discard(item)
        yield "a set"
    elif isinstance(holder, types.CellType):
        before = kept.before(holder, "cell_contents")
        holder.cell_contents = None if before is _MISSING else before
        yield "a variable of a closure"
    elif not isinstance(holder, (torch.Tensor, types.ModuleType, types.GeneratorType, type)):
        names = [k for k, v in getattr(holder, "__dict__", {}).items() if id(v) in ids]
        names += [k for k in _slots_of(holder) if id(getattr(holder, k, None)) in ids]
        for name in names:
            before = kept.before(getattr(holder, "__dict__", None), name)
            if before is _MISSING:
                object.__delattr__(holder, name)
            else:
                object.__setattr__(holder, name, before)
            yield f"`{type(holder).__name__}.{name}`"


def _put_back(holder: dict[Any, Any], owner: Any, key: Any, kept: Kept) -> None:
    if isinstance(owner, type):  # behind its back it would not notice
        before = kept.before(owner, key)
        if before is _MISSING:
            delattr(owner, key)
        else:
            setattr(owner, key, before)
        return
    before = kept.before(holder, key)
    if before is _MISSING:
        del holder[key]
    else:
        holder[key] = before


def _owner_of(attributes: dict[Any, Any]) -> Any:
    """Returns the class, module or object whose attributes a dict is; None for a dict of its own."""
    for owner in gc.get_referrers(attributes):
        held = getattr(owner, "__dict__", None)
        if held is attributes:
            return owner
        if isinstance(owner, type) and held is not None and held.keys() == attributes.keys():
            return owner
    return None


def _name_of(owner: Any) -> str:
    if owner is None:
        return "a dict"
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__name__)


def _slots_of(item: Any) -> list[str]:
    return [k for base in type(item).__mro__ for k, v in vars(base).items() if type(v) is types.MemberDescriptorType]


def _is_library(name: str) -> bool:
    root = name.partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")
