"""Finds fake tensors that outlive a capture, and removes them from the objects that hold them.

A forward may store results where no snapshot looks: in an `lru_cache`, an object of a library, a container that only a
function's default refers to. After a capture these would hold fake tensors, and the next real step would compute with
them. The garbage collector lists the fake tensors that are left and their referrers, from which they are removed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from recoup import _torch
from recoup._collector import few_full_collections
from recoup._interrupts import heard, under_modes
from recoup.capture.tracker import Tracker
from recoup.errors import InternalError
from recoup.thresholds import MOST_TRIES

_CLIMBED = (tuple, frozenset, functools.partial, types.MethodType, types.BuiltinMethodType)

T = TypeVar("T")


@heard()
@under_modes()
def run_on_fakes(body: Callable[[Any, list[Tracker]], T], *, is_thorough: bool) -> tuple[T, list[str]]:
    """Runs `body` with a new fake mode, and leaves no fake tensor behind, whatever happens.

    Args:
        body: is given the mode, and a list to which it adds the trackers that watch its ops.
        is_thorough: search all objects in any case, not only if a storage that a tracker has seen is still alive.

    Returns:
        Its result, and sentences about the objects that held fake tensors.

    Raises:
        InternalError: if a fake tensor cannot be removed from an object that holds it.
    """
    mode = _torch.fake_tensor_mode()
    left = weakref.ref(mode)  # each of its tensors holds it
    trackers: list[Tracker] = []
    with few_full_collections():
        try:
            result = body(mode, trackers)
        except BaseException as error:
            _forget_locals(error, mode)
            del mode
            trackers.clear()
            _take_back(left, is_strict=False)
            raise
        torch.clear_autocast_cache()  # inside the user's autocast it holds casts of fake weights
        del mode
        is_suspect = left() is not None and (is_thorough or any(t.holds_fakes() for t in trackers))
        trackers.clear()
        return result, _take_back(left, is_strict=True) if is_suspect else []


def _forget_locals(error: BaseException | None, mode: Any) -> None:
    """Clears the local variables in the frames of an error that is about to reach the user.

    A frame also refers to its function, and so to the variables that it closes over: in torch's `_call_impl`, the
    module's arguments. Those are cleared too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for function in (f for f in gc.get_referents(frame) if type(f) is types.FunctionType):
                for cell in function.__closure__ or ():
                    _empty(cell, mode)
        error = error.__cause__ or error.__context__


def _empty(cell: types.CellType, mode: Any) -> None:
    """Empties a closure's cell if it holds a fake tensor of the mode, or a tuple or dict with some."""
    with contextlib.suppress(ValueError):  # it is empty
        held = cell.cell_contents
        if type(held) is dict:
            for key in [k for k, v in held.items() if _torch.fakes_among([v], mode)]:
                del held[key]
        elif _torch.fakes_among(list(held) if type(held) is tuple else [held], mode):
            cell.cell_contents = None


def _take_back(held: weakref.ref[Any], *, is_strict: bool) -> list[str]:
    """Removes the mode's fake tensors from all objects that hold them; returns sentences about these objects."""
    found: list[str] = []
    torch.clear_autocast_cache()
    gc.collect(1)  # what the capture itself left in cycles is all young: a full collection looks at all of a process
    mode = held()
    if mode is None or not _fakes_of(mode):
        return found
    gc.collect()
    with _thawed():
        for _ in range(MOST_TRIES):  # an object that held the first may itself have been held by others
            left = _fakes_of(mode)
            if not left:
                return found
            found += _release(left)
            del left
            gc.collect()
    if is_strict and _fakes_of(mode):
        raise InternalError(
            f"{len(_fakes_of(mode))} fake tensors of a capture are still held, and not by anything they can be taken "
            "from. Please report the model; restart Python before training on. (recoup.capture.leaks)"
        )
    return found


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """Makes what the user has hidden from the collector (`gc.freeze`) visible inside the block; it is hidden after."""
    was_frozen = gc.get_freeze_count() > 0
    if was_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if was_frozen:
            gc.collect()
            gc.freeze()


def _fakes_of(mode: Any) -> list[torch.Tensor]:
    return _torch.fakes_among(gc.get_objects(), mode)


def _release(fakes: list[torch.Tensor]) -> list[str]:
    found: list[str] = []
    for fake in fakes:  # a graph that was never run back and that saves its own results, by a user's hooks, is a cycle
        with contextlib.suppress(RuntimeError):  # a view: its base is among them
            fake.detach_()
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
                found += _remove(holder, ids)
        level = above
    return found


def _has_grad(tensor: torch.Tensor, fakes: set[int]) -> bool:
    try:
        return tensor.is_leaf and tensor.grad is not None and id(tensor.grad) in fakes
    except RuntimeError:  # a tensor of another library, or one that is no longer to be asked
        return False


def _remove(holder: Any, ids: set[int]) -> Iterator[str]:
    """Removes objects with these ids from an object that holds them; yields its description."""
    if type(holder) is functools._lru_cache_wrapper:  # type: ignore[attr-defined]
        holder.cache_clear()
        yield f"the cache of `{getattr(holder, '__qualname__', holder)}`"
    elif isinstance(holder, dict):
        owner = _owner_of(holder)
        for key in [k for k, v in holder.items() if id(v) in ids or id(k) in ids]:
            if isinstance(owner, type):
                delattr(owner, key)  # behind its back a class would not notice
            else:
                del holder[key]
            yield f"{_name_of(owner)}[{key!r}]" if owner is None else f"`{_name_of(owner)}.{key}`"
    elif isinstance(holder, (list, collections.deque)):
        items = [o for o in holder if id(o) not in ids]
        holder.clear()
        holder.extend(items)
        yield "a list"
    elif isinstance(holder, set):
        for item in [o for o in holder if id(o) in ids]:
            holder.discard(item)
        yield "a set"
    elif isinstance(holder, types.CellType):
        holder.cell_contents = None
        yield "a variable of a closure"
    elif not isinstance(holder, (torch.Tensor, types.ModuleType, types.GeneratorType, type)):
        names = [k for k, v in getattr(holder, "__dict__", {}).items() if id(v) in ids]
        names += [k for k in _slots_of(holder) if id(getattr(holder, k, None)) in ids]
        for name in names:
            object.__delattr__(holder, name)
            yield f"`{type(holder).__name__}.{name}`"


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
