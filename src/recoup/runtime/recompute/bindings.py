"""Which parameter and which child each name of some modules stood for at a forward, and what the parameters held.

`torch.func.functional_call`, hypernetworks, MAML's fast weights and Bayesian weights bind other tensors to a module's
names for the time of a forward; a GAN freezes its discriminator for one. The replay, which runs later, finds the very
tensors and the very `requires_grad` of the forward; afterwards everything is bound as before it. What the tensors held
cannot be brought back: one that was changed since is refused, also where its version does not tell (`.data`).
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
from recoup.runtime.recompute.rng_state import version_of
from recoup.runtime.recompute.spot_check import read_bytes


class _Weight:
    """A parameter, or what stood in its place: its version, whether it required a gradient, where and what it was."""

    __slots__ = ("contents", "is_managed", "name", "requires_grad", "storage", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.version = version_of(tensor)
        self.requires_grad = tensor.requires_grad
        self.is_managed = _torch.is_sharded_parameter(tensor)
        self.storage = None if self.is_managed else storage_of(tensor)
        self.contents = b"" if self.storage is None else read_bytes(tensor)

    def change(self) -> str:
        """Returns how it was changed since, or ""."""
        if version_of(self.tensor) != self.version:
            return "was changed in place"
        if self.storage is None:
            return ""
        if storage_of(self.tensor) != self.storage:
            return "was given other data (`.data = ...`)"
        if self.contents and read_bytes(self.tensor) != self.contents:
            return "was changed through `.data`, which autograd does not see,"
        return ""

    def stands(self) -> bool:
        """Whether a replay may take the tensor itself: it is a leaf that requires a gradient as it did."""
        return self.tensor.is_leaf and self.tensor.requires_grad == self.requires_grad

    def again(self) -> torch.Tensor:
        """Returns the tensor for a replay, requiring a gradient as it did then, cut from the graph it came from."""
        if self.stands():
            return self.tensor
        again = self.tensor.detach()
        if isinstance(self.tensor, nn.Parameter):
            return nn.Parameter(again, requires_grad=self.requires_grad)
        return again.requires_grad_(self.requires_grad)


class Bindings:
    """The parameters and children of some modules at one moment.

    Args:
        modules: (path, module), as `module_state.walk` returns them.

    Attributes:
        storages: those of the parameters; no activation lies in one.
    """

    __slots__ = ("_children", "_parameters", "_weights", "storages")

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._weights: dict[int, _Weight] = {}
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
                if tensor is not None and id(tensor) not in self._weights:
                    self._weights[id(tensor)] = _Weight(f"{path}.{name}" if path else name, tensor)
        self.storages = {w.storage for w in self._weights.values() if w.storage is not None}

    def check(self, region: str) -> None:
        """Raises if a parameter does not hold any more what it held."""
        for weight in self._weights.values():
            change = weight.change()
            if change:
                raise ReplayError(
                    f"Region `{region}`: its parameter `{weight.name}` {list(weight.tensor.shape)} {change} between "
                    "forward and backward, so a second forward would compute other values. Call backward before "
                    "changing it, or leave this module out of the plan.",
                    code="E201",
                )

    def stand(self) -> bool:
        """Whether everything is bound as it was, and each parameter requires a gradient as it did."""
        for ref, names in self._parameters:
            module = ref()
            if module is not None and not _is_same(module._parameters, names):
                return False
        for ref, names in self._children:
            module = ref()
            if module is not None and not _is_same(module._modules, names):
                return False
        return all([w.is_managed or w.stands() for w in self._weights.values()])

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Binds everything as it was and, at the end, as it is now; touches nothing that is bound as it was."""
        changes: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        made: dict[int, torch.Tensor] = {}  # a tensor under two names is one tensor again
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
        weight = self._weights[id(tensor)]
        if weight.is_managed or (now is not None and _torch.is_sharded_parameter(now)):
            return now  # FSDP and ZeRO shard and gather around each module's forward, in a replay too
        if id(tensor) not in made:
            made[id(tensor)] = weight.again()
        return made[id(tensor)]


def storage_of(tensor: torch.Tensor) -> int | None:
    """Returns the identity of the tensor's storage, None if it has none of its own (sparse, or a wrapper of others)."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _is_same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, map(now.get, then), then.values()))


def _rebind(names: dict[str, Any], values: dict[str, Any]) -> None:
    names.clear()
    names.update(values)
