"""The *integer island*: tensors of a captured step whose values are known, so that the model may branch on them.

Token ids, masks and position tables decide which branch a model takes. Ops whose tensor inputs are all known and whose
results are integer, boolean or tiny run for real (`arange`, comparisons, `all`, `item`). In a step on the CPU these are
real tensors among the fake ones. In a step on another device they are fake like the others, so that ops may take them
beside fake parameters, and their values are kept on the host; no op runs on the device.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup import _torch
from recoup.thresholds import ASIDE_ELEMENTS

TINY_ELEMENTS = 64  # up to here a floating result is kept real (a scale, a threshold), and values are compared
_INTEGER_DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
UNKNOWN = object()  # the op's result is not known


class Island:
    """Known values of one captured step's tensors.

    Args:
        device: of the step's tensors.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._is_host = self._device.type == "cpu"
        self._contents: dict[int, tuple[weakref.ref[Any], torch.UntypedStorage]] = {}

    def admit(self, host: torch.Tensor) -> torch.Tensor:
        """Returns the fake tensor of a real host tensor; call under the fake mode."""
        if self._is_host:
            return host
        fake = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        with _torch.without_dispatch_modes():
            laid = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype).copy_(host)
        storage = fake.untyped_storage()
        self._contents[storage._cdata] = (weakref.ref(storage), laid.untyped_storage())
        return fake

    def knows(self, tensors: list[torch.Tensor]) -> bool:
        """Whether all these values are known."""
        return all(not _torch.is_fake(t) or self._storage_of(t) is not None for t in tensors)

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Runs an op whose `tensors` are all known; returns `UNKNOWN` if it is to run on fake tensors."""
        if sum(t.numel() for t in tensors) > ASIDE_ELEMENTS:
            return UNKNOWN
        if not tensors:
            if torch.Tag.nondeterministic_seeded in func.tags or not _is_small(func(*args, **kwargs)):
                return UNKNOWN
        elif not self._is_host and _is_view(func) and _torch.is_fake(tensors[0]):
            return UNKNOWN  # the storage stays the one whose contents are known
        with _torch.without_dispatch_modes():
            hosts = {id(t): self._host(t) for t in tensors}
            out = func(*_map(args, hosts, self._is_host), **_map(kwargs, hosts, self._is_host))
        if not _is_small(out):
            return UNKNOWN
        if self._is_host or _goes_to_host(kwargs, tensors):
            return out
        return self._admitted(out, {id(host): t for t in tensors for host in (hosts[id(t)],)})

    def counted(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with masks among an indexing's indices replaced by positions, as its kernel does.

        How many there are is a matter of values; of masks that are known it is known.
        """
        if func._schema.name not in _INDEXING or len(args) < 2:
            return args
        indices: list[Any] = []
        for index in args[1]:
            is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            if not is_mask or not self.knows([index]):
                indices.append(index)
                continue
            with _torch.without_dispatch_modes():
                positions = self._host(index).nonzero(as_tuple=True)
            indices += [self.admit(position) for position in positions]
        return (args[0], indices, *args[2:])

    def forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Drops the known values that an op with unknown inputs may overwrite."""
        if not self._contents or not func._schema.is_mutable:
            return
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                for item in written if isinstance(written, (list, tuple)) else (written,):
                    if isinstance(item, torch.Tensor) and _torch.is_fake(item):
                        self._contents.pop(item.untyped_storage()._cdata, None)

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if not self._contents or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        found = self._contents.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self._storage_of(tensor) if _torch.is_fake(tensor) else None
        if storage is None:
            return tensor
        part = torch.empty(0, dtype=tensor.dtype)
        return part.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _admitted(self, out: Any, fakes: dict[int, torch.Tensor]) -> Any:
        if isinstance(out, torch.Tensor):
            return fakes[id(out)] if id(out) in fakes else self.admit(out)
        if isinstance(out, (tuple, list)):
            return type(out)(self._admitted(item, fakes) for item in out)
        return out


def _goes_to_host(kwargs: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an op's result lies on the host: by its `device` argument, or because all its inputs do."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "cpu"
    return not any(map(_torch.is_fake, tensors))


def _map(nest: Any, hosts: dict[int, torch.Tensor], is_host: bool) -> Any:
    """Returns an op's arguments for a run on the host."""
    if is_host:
        return nest
    if isinstance(nest, torch.Tensor):
        return hosts[id(nest)]
    if isinstance(nest, torch.device):
        return torch.device("cpu")
    if isinstance(nest, dict):
        return {key: _map(item, hosts, is_host) for key, item in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(_map(item, hosts, is_host) for item in nest)
    return nest


def _is_view(func: Any) -> bool:
    """Whether an op gives another view of what it is handed, or makes the tensor itself one."""
    returns = func._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return is_view or torch.Tag.inplace_view in func.tags


def _is_small(out: Any) -> bool:
    """Whether a result's values are kept: integer, boolean, tiny, or no tensor."""
    if isinstance(out, torch.Tensor):
        return out.dtype in _INTEGER_DTYPES or out.numel() <= TINY_ELEMENTS
    if isinstance(out, (tuple, list)):
        return all(_is_small(o) for o in out)
    return True
