"""The parameters and children bound to a region's modules at its forward, restored for the replay.

`torch.func.functional_call`, hypernetworks, MAML's fast weights and Bayesian weights bind other tensors to a module's
names during a forward; a GAN freezes its discriminator for one. The replay runs with the tensors and `requires_grad`
flags of the forward; afterwards the current ones are bound again. Values of parameters are not copied: a parameter that
was changed since is refused, also where its version counter does not tell (`.data`).
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.errors import ReplayError
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.recompute.rng_state import versions_of


class Bindings:
    """Snapshot of the parameters and children of some modules.

    Args:
        modules: (path, module) pairs, as `module_state.walk` returns them.
        places: the region's, for `samples_of`.

    Attributes:
        storages: storages of the parameters; no activation lies in one.
    """

    __slots__ = (
        "_children",
        "_contents",
        "_is_managed",
        "_names",
        "_parameters",
        "_requires_grad",
        "_samples",
        "_storages",
        "_tensors",
        "_versions",
        "storages",
    )

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], places: Places) -> None:
        weights: dict[int, tuple[str, str, torch.Tensor]] = {}
        self._parameters: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        self._children: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        for path, module in modules:
            # A ScriptModule's tables are windows on what TorchScript holds, which nobody binds anew.
            is_bound_anew = not isinstance(module, torch.jit.ScriptModule)
            if module._modules and is_bound_anew:
                self._children.append((weakref.ref(module), dict(module._modules)))
            if not module._parameters:
                continue
            if is_bound_anew:
                self._parameters.append((weakref.ref(module), dict(module._parameters)))
            for name, tensor in module._parameters.items():
                if tensor is not None and id(tensor) not in weights:
                    weights[id(tensor)] = path, name, tensor
        # Lists side by side, for all parameters at once: what is noted of each is compared at every replay.
        self._names = [(path, name) for path, name, _ in weights.values()]
        self._tensors = tensors = [tensor for _, _, tensor in weights.values()]
        self._versions = versions_of(tensors)
        self._requires_grad = [t.requires_grad for t in tensors]
        self._is_managed = list(map(_torch.is_sharded_parameter, tensors))
        self._storages = self._storages_now()
        self._samples = places.samples_of(tensors)
        self._contents = self._contents_now()
        self.storages = {storage for storage in self._storages if storage is not None}

    def _storages_now(self) -> list[int | None]:
        """Returns each parameter's storage; None if FSDP or ZeRO moves it, or it has no storage."""
        found = list(map(storage_of, self._tensors))
        if any(self._is_managed):
            return [None if managed else f for f, managed in zip(found, self._is_managed, strict=True)]
        return found

    def _contents_now(self) -> list[bytes]:
        found = self._samples.read(self._tensors)
        if None in self._storages:
            return [f if s is not None else b"" for f, s in zip(found, self._storages, strict=True)]
        return found

    def check(self, region: str) -> None:
        """Raises ReplayError if a parameter's values were changed."""
        versions, storages = versions_of(self._tensors), self._storages_now()
        contents = self._contents_now()
        if versions == self._versions and storages == self._storages and contents == self._contents:
            return
        for i, tensor in enumerate(self._tensors):
            if versions[i] != self._versions[i]:
                change = "was changed in place"
            elif storages[i] != self._storages[i]:
                change = "was given other data (`.data = ...`)"
            elif self._contents[i] and contents[i] != self._contents[i]:
                change = "was changed through `.data`, which autograd does not see,"
            else:
                continue
            name = ".".join(filter(None, self._names[i]))
            raise ReplayError(
                f"Region `{region}`: its parameter `{name}` {list(tensor.shape)} {change} between forward and "
                "backward, so a second forward would compute other values. Call backward before changing it, or leave "
                "this module out of the plan.",
                code="E201",
            )

    def stand(self) -> bool:
        """Whether all bindings and `requires_grad` flags are those of the snapshot."""
        for ref, names in self._parameters:
            module = ref()
            if module is not None and not _is_same(module._parameters, names):
                return False
        for ref, names in self._children:
            module = ref()
            if module is not None and not _is_same(module._modules, names):
                return False
        return all(map(self._stands, range(len(self._tensors))))

    def _stands(self, i: int) -> bool:
        """Whether a replay may use the i-th parameter itself: a leaf with the noted `requires_grad`."""
        tensor = self._tensors[i]
        return self._is_managed[i] or (tensor.is_leaf and tensor.requires_grad == self._requires_grad[i])

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Restores the noted bindings inside of the block; unchanged ones are not touched."""
        changes: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        made: dict[int, torch.Tensor] = {}  # a tensor under two names gets one stand-in
        for ref, names in self._parameters:
            module = ref()
            if module is None:
                continue
            now, then = module._parameters, {}
            for name, tensor in names.items():
                then[name] = tensor if tensor is None else self._again(tensor, now.get(name), made)
            if not _is_same(now, then):
                changes.append((now, then, now.copy()))
        for ref, names in self._children:
            module = ref()
            if module is not None and not _is_same(module._modules, names):
                changes.append((module._modules, names, dict(module._modules)))
        try:
            for now, then, _ in changes:
                _rebind(now, then)
            yield
        finally:
            for now, _, before in changes:
                _rebind(now, before)

    def _again(self, tensor: torch.Tensor, now: torch.Tensor | None, made: dict[int, torch.Tensor]) -> Any:
        """Returns a parameter's stand-in for a replay: detached, with the noted `requires_grad`."""
        i = next(i for i, known in enumerate(self._tensors) if known is tensor)
        if self._is_managed[i] or (now is not None and _torch.is_sharded_parameter(now)):
            return now  # FSDP and ZeRO gather and shard around each module's forward, also in a replay
        if self._stands(i):
            return tensor
        if id(tensor) not in made:
            requires_grad, again = self._requires_grad[i], tensor.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (
                nn.Parameter(again, requires_grad=requires_grad)
                if is_parameter
                else again.requires_grad_(requires_grad)
            )
        return made[id(tensor)]


def storage_of(tensor: torch.Tensor) -> int | None:
    """Returns an id of the tensor's storage; None if it has none of its own (sparse, wrapper subclasses)."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return _torch.storage_address(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def _is_same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, map(now.get, then), then.values()))


def _rebind(names: dict[str, Any], values: dict[str, Any]) -> None:
    names.clear()
    names.update(values)
