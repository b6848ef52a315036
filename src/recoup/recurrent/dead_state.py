"""Dead state: attributes that a module writes in every step and overwrites before it reads them.

A neuron's last spikes or reset signal, kept for inspection, would be held with every state. Such a value is recognised
in a first step (no op takes it as an argument) and is not held. Steps find an `Unread` in its place: any use except
comparison with `is` raises `StillRead`, and the loop starts again with everything held.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from recoup import _torch
from recoup.recurrent.closure_inspection import Place
from recoup.recurrent.leaves import flatten, rebuild

# Of a class itself, or made of an instance before there is anything to refuse.
_OF_THE_CLASS = frozenset({"class", "dict", "doc", "init", "module", "new", "slots", "subclasshook", "weakref"})


class StillRead(BaseException):
    """A step read a value that was taken for dead. A step's own `except Exception` must not hide it."""


# Outside a running loop, and in other threads, a debugger or a walk over all objects may look at an `Unread`.
_in_loop: contextvars.ContextVar[bool] = contextvars.ContextVar("recoup_in_loop", default=False)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Makes every `Unread` refuse use by this thread inside of the context."""
    token = _in_loop.set(True)
    try:
        yield
    finally:
        _in_loop.reset(token)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    if _in_loop.get():
        raise StillRead
    raise TypeError("a value that no step of a scan reads was not kept")


class Unread:
    """Placeholder of a dead value; refuses every use, also by torch's functions and `isinstance`."""

    __slots__ = ()
    __torch_function__ = _refuse

    def __getattribute__(self, name: str) -> Any:
        return _refuse() if _in_loop.get() else object.__getattribute__(self, name)


_kept = frozenset(vars(Unread))
for _name in {name for kind in (torch.Tensor, int, float, list, dict) for name in dir(kind)}:  # operators: of the type
    is_operator = _name.startswith("__") and _name not in _kept and not _name.startswith("__init_")
    if is_operator and _name.strip("_") not in _OF_THE_CLASS:
        setattr(Unread, _name, _refuse)

UNREAD = Unread()
DROPPED = object()  # stands for an `Unread` in the loop's own pytrees


class UnreadPlace:
    """A place whose value is not held; reads as `DROPPED`, which is stored as an `Unread`."""

    __slots__ = ("_place", "name")

    def __init__(self, place: Place) -> None:
        self._place = place
        self.name = place.name

    def get(self) -> Any:
        """Returns the current contents; `DROPPED` if they are an `Unread`."""
        value = self._place.get()
        return DROPPED if value is UNREAD else value

    def put(self, value: Any) -> None:
        """Stores `value` there; `DROPPED` as an `Unread`."""
        self._place.put(UNREAD if value is DROPPED else value)


class Watch(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Records the storages that ops read while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(args)
        if kwargs:
            self._note(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _note(self, items: Iterable[Any]) -> None:
        for item in items:
            if isinstance(item, torch.Tensor):
                if item.layout is torch.strided:
                    self._taken.add(item.untyped_storage()._cdata)
            elif isinstance(item, (list, tuple)):
                self._note(item)

    def has_taken(self, tensor: torch.Tensor) -> bool:
        """Whether an op read the tensor, or another tensor of the same storage."""
        return tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in self._taken


class Writes(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Records the storages that ops write while the mode is on, including writes that bump no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self._written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.is_higher_order(func):
            return func(*args, **kwargs)
        written, name = _torch.written_arguments(func, args, kwargs), func._schema.name
        if "batch_norm" in name and "backward" not in name:  # writes running statistics, which its schema does not say
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            if named.get("training", named.get("train", True)):
                written += [named[n] for n in ("running_mean", "running_var") if named.get(n) is not None]
        self._written.update(t.untyped_storage()._cdata for t in written if t.layout is torch.strided)
        return func(*args, **kwargs)

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Whether an op wrote to the tensor's storage; a tensor without one (sparse) counts as written."""
        return tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in self._written


def left_in(template: Any, num_tensors: int, dropped: list[bool]) -> tuple[list[int], Any]:
    """Returns which tensors of a flattened (state, carried values) are not dropped, and the template of the rest."""
    stand_ins = [torch.empty(0) for _ in range(num_tensors)]
    state, values = rebuild(template, stand_ins)
    kept, template = flatten((state, [DROPPED if d else v for v, d in zip(values, dropped, strict=True)]))
    position = {id(tensor): i for i, tensor in enumerate(stand_ins)}
    return [position[id(tensor)] for tensor in kept], template
