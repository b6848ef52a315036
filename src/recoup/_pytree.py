"""Nests of tensors, taken apart and put together again: the one walk of the whole project.

Known: lists, tuples, named tuples (`PackedSequence` is one), dicts of every kind (`defaultdict`, `OrderedDict`,
`UserDict` as transformers' `BatchEncoding`, read-only views), deques, sets, dataclasses and attrs classes, and whatever
was registered with torch's pytrees (transformers' `ModelOutput`s are). Anything else is a leaf.

A container is put together without its constructor, from an empty copy of the one that was taken apart: constructors
may check what they are given, take other arguments, or do something. Only what was registered with torch is made the
way it was registered.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from recoup import _torch

_ATOMS = frozenset([int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size])

Build = Callable[[Sequence[Any]], Any]


def open_nest(nest: Any) -> tuple[Iterable[Any], Build] | None:
    """Returns a container's contents and a function that makes one like it of others; None if it is a leaf."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return nest, kind
    if kind is dict:
        return nest.values(), functools.partial(_dict_of, tuple(nest))
    if kind in _ATOMS or isinstance(nest, (torch.Tensor, type, types.ModuleType, torch.nn.Module)):
        return None
    registered = _torch.pytree_node(kind)
    if registered is not None:
        opened: tuple[Iterable[Any], Build] = registered(nest)
        return opened
    try:
        return _open_other(nest, kind)
    except (TypeError, AttributeError, RecursionError):  # one that cannot even be copied
        return None


def _open_other(nest: Any, kind: type[Any]) -> tuple[Iterable[Any], Build] | None:
    if isinstance(nest, tuple):
        is_struct = hasattr(kind, "n_sequence_fields")  # a result of torch.max and the like
        return nest, kind if is_struct else functools.partial(tuple.__new__, kind)
    if isinstance(nest, (list, collections.deque, dict, collections.UserDict)):
        template = copy.copy(nest)
        held = _attributes_of(template)
        if isinstance(nest, collections.UserDict):
            del held["data"]
        template.clear()
        _set(template, dict.fromkeys(held))
        if isinstance(nest, (list, collections.deque)):
            return [*nest, *held.values()], functools.partial(_fill_list, template, len(nest), tuple(held))
        return [*nest.values(), *held.values()], functools.partial(_fill_dict, template, tuple(nest), tuple(held))
    if kind in (set, frozenset):
        return nest, kind
    if kind is types.MappingProxyType:
        keys = tuple(nest)
        return nest.values(), lambda items: types.MappingProxyType(_dict_of(keys, items))
    if dataclasses.is_dataclass(nest) or hasattr(kind, "__attrs_attrs__"):
        names = [f.name for f in (dataclasses.fields(nest) if dataclasses.is_dataclass(nest) else kind.__attrs_attrs__)]
        held = {name: getattr(nest, name) for name in names if hasattr(nest, name)} | _attributes_of(nest)
        template = copy.copy(nest)
        _set(template, dict.fromkeys(held))
        return held.values(), functools.partial(_fill_object, template, tuple(held))
    return None


def _attributes_of(nest: Any) -> dict[str, Any]:
    return dict(getattr(nest, "__dict__", {}))


def _set(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(owner, name, value)  # frozen ones too


def _dict_of(keys: tuple[Any, ...], items: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(keys, items, strict=True))


def _fill_list(template: Any, num_items: int, names: tuple[str, ...], items: Sequence[Any]) -> Any:
    made = copy.copy(template)
    made.extend(items[:num_items])
    _set(made, _dict_of(names, items[num_items:]))
    return made


def _fill_dict(template: Any, keys: tuple[Any, ...], names: tuple[str, ...], items: Sequence[Any]) -> Any:
    made = copy.copy(template)
    put = next(c for c in (collections.OrderedDict, collections.UserDict, dict) if isinstance(made, c)).__setitem__
    for key, item in zip(keys, items, strict=False):
        put(made, key, item)
    _set(made, _dict_of(names, items[len(keys) :]))
    return made


def _fill_object(template: Any, names: tuple[str, ...], items: Sequence[Any]) -> Any:
    made = copy.copy(template)
    _set(made, _dict_of(names, items))
    return made


class Structure:
    """A nest without its leaves."""

    __slots__ = ("_build", "_parts", "num_leaves")

    def __init__(self, build: Build, parts: list[Structure | None]) -> None:
        self._build = build
        self._parts = parts
        self.num_leaves: int = sum(1 if part is None else part.num_leaves for part in parts)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Returns the nest, new containers around `leaves`."""
        items, at = [], 0
        for part in self._parts:
            if part is None:
                items.append(leaves[at])
                at += 1
            else:
                items.append(part.unflatten(leaves[at : at + part.num_leaves]))
                at += part.num_leaves
        return self._build(items)


def flatten(nest: Sequence[Any]) -> tuple[list[Any], Structure]:
    """Returns the leaves of a container in order, tensors and others, and the structure around them."""
    leaves: list[Any] = []
    structure = _flatten(nest, leaves)
    assert structure is not None, "a leaf has no structure"
    return leaves, structure


def _flatten(nest: Any, leaves: list[Any]) -> Structure | None:
    opened = open_nest(nest)
    if opened is None:
        leaves.append(nest)
        return None
    children, build = opened
    return Structure(build, [_flatten(child, leaves) for child in children])


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Returns `nest` with every tensor replaced by `function(tensor)`; a container without one comes back itself."""
    if isinstance(nest, torch.Tensor):
        return function(nest)
    opened = open_nest(nest)
    if opened is None:
        return nest
    children, build = opened
    old = list(children)
    new = [map_tensors(function, child) for child in old]
    return nest if all(a is b for a, b in zip(new, old, strict=True)) else build(new)


def iterate_tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of `nest` in order."""
    if isinstance(nest, torch.Tensor):
        yield nest
        return
    opened = open_nest(nest)
    if opened is not None:
        for child in opened[0]:
            yield from iterate_tensors(child)


def argument_tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among an op's arguments, where only lists and tuples hold others: for what runs every op."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from argument_tensors(argument)


def collect_tensors(arguments: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Appends to `found` what `argument_tensors` yields, in less time."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            collect_tensors(argument, found)


def num_rows(batch: Any) -> int:
    """Returns the largest first dimension of the batch's tensors."""
    return max((t.shape[0] for t in iterate_tensors(batch) if t.dim() > 0), default=0)


def first_half(batch: Any) -> Any:
    """Returns the first half of the batch; the batch itself if it cannot be halved."""
    full = num_rows(batch)
    if full < 2:
        return batch
    return map_tensors(lambda t: t[: full // 2] if t.dim() > 0 and t.shape[0] == full else t, batch)
