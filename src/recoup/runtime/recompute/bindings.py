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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.errors import ReplayError
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.recompute.rng_state import versions_of

_Table = tuple[weakref.ref[nn.Module], dict[str, Any]]  # a module, and what one of its tables held


class Bindings:
    """Snapshot of the parameters and children of some modules.

    Args:
        modules: (path, module) pairs, as `module_state.walk` returns them.
        places: the region's, for `samples_of`.

    Attributes:
        storages: of those whose bytes do not tell them: on a device, or no `nn.Parameter`s. No activation lies in one.
    """

    __slots__ = (
        "_are_sharded",
        "_children",
        "_contents",
        "_names",
        "_parameters",
        "_requires_grad",
        "_samples",
        "_storages",
        "_tensors",
        "_versions",
        "storages",
    )

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], places: Places) -> None:
        self._parameters: list[_Table] = []
        self._children: list[_Table] = []
        self._names: list[tuple[str, dict[str, Any]]] = []  # path of a module, its parameters
        held: list[torch.Tensor | None] = []
        for path, module in modules:
            children, parameters = module._modules, module._parameters
            # A ScriptModule's tables are windows on what TorchScript holds, which nobody binds anew.
            if children and not isinstance(module, torch.jit.ScriptModule):
                self._children.append((weakref.ref(module), dict(children)))
            if parameters:
                names = dict(parameters)
                held += names.values()
                self._names.append((path, names))
                if not isinstance(module, torch.jit.ScriptModule):
                    self._parameters.append((weakref.ref(module), names))
        # Lists side by side, for all parameters at once: what is noted of each is compared at every replay.
        self._tensors = tensors = [t for t in dict(zip(map(id, held), held, strict=True)).values() if t is not None]
        self._versions = versions_of(tensors)
        self._requires_grad = [t.requires_grad for t in tensors]
        self._are_sharded = _torch.are_sharded(tensors)
        self._samples = places.samples_of(tensors)
        self._storages = self._storages_now()
        self._contents = self._contents_now()
        self.storages = {
            storage
            for storage, tensor, contents in zip(self._storages, tensors, self._contents, strict=True)
            if storage is not None and (type(tensor) is not nn.Parameter or not contents)
        }

    def _storages_now(self) -> list[int | None]:
        """Returns each parameter's storage; None if FSDP or ZeRO moves it, or it has no storage."""
        found = self._samples.storages(self._tensors)
        if self._are_sharded is not None:
            return [None if managed else f for f, managed in zip(found, self._are_sharded, strict=True)]
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
            raise ReplayError(
                f"Region `{region}`: its parameter `{self._name_of(tensor)}` {list(tensor.shape)} {change} between "
                "forward and backward, so a second forward would compute other values. Call backward before changing "
                "it, or leave this module out of the plan.",
                code="E201",
            )

    def _name_of(self, tensor: torch.Tensor) -> str:
        path, name = next((path, name) for path, names in self._names for name, t in names.items() if t is tensor)
        return ".".join(filter(None, (path, name)))

    def are_same(self) -> bool:
        """Whether every name is bound to what it was bound to."""
        for tables, kind in ((self._parameters, "_parameters"), (self._children, "_modules")):
            for ref, names in tables:
                module = ref()
                if module is not None and not _is_same(module.__dict__[kind], names):
                    return False
        return True

    def have_same_flags(self) -> bool:
        """Whether a replay may use the parameters themselves: leaves with the noted `requires_grad`."""
        if self._are_sharded is not None:
            return all(map(self._stands, range(len(self._tensors))))
        is_same = [t.requires_grad for t in self._tensors] == self._requires_grad
        return is_same and all([t.is_leaf for t in self._tensors])

    def _stands(self, i: int) -> bool:
        """Whether a replay may use the i-th parameter itself: a leaf with the noted `requires_grad`."""
        tensor = self._tensors[i]
        is_sharded = self._are_sharded is not None and self._are_sharded[i]
        return is_sharded or (tensor.is_leaf and tensor.requires_grad == self._requires_grad[i])

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
        is_sharded = self._are_sharded is not None and self._are_sharded[i]
        if is_sharded or (now is not None and _torch.is_sharded_parameter(now)):
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


def _is_same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, map(now.get, then), then.values()))


def _rebind(names: dict[str, Any], values: dict[str, Any]) -> None:
    names.clear()
    names.update(values)
