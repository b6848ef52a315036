"""Arguments and module state at the start of a loop's call, described so that two calls can be compared."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.capture.folding.surface import PLAIN_TYPES, describe, traits_of, values_of
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.module_state import walk

_NOT_PLAIN = object()
_SKIPPED = (frozenset(nn.Module().__dict__) | {"forward"}) - {"training"}


@dataclasses.dataclass(slots=True)
class Entry:
    """State at the start of a call: a description with tensors numbered, values of real tensors, the tensors."""

    description: Any
    values: Any
    tensors: list[torch.Tensor]
    state: list[tuple[dict[str, Any], str, Any]]

    def let_go(self) -> None:
        """Drops the references to the tensors."""
        self.tensors, self.state = [], []


class Finder:
    """Describes arguments and state of the calls of one module, and reuses what is equal to the call before."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [m for _, m in walk(module)]
        self._last_state: list[Any] = []
        self._plain: Any = ()
        self._rest: list[int] = []
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def enter(self, args: Any, kwargs: Any) -> Entry:
        """Returns the arguments and module state of a call, before it runs."""
        tensors: list[torch.Tensor] = []
        seen: dict[int, int] = {}
        state = self.state()
        held = [value if type(value) in PLAIN_TYPES else _NOT_PLAIN for _, _, value in state]
        if len(held) != len(self._last_state) or not all(map(operator.is_, held, self._last_state)):
            self._last_state = held
            self._plain = tuple((id(t), name, v if type(v) in PLAIN_TYPES else None) for t, name, v in state)
            self._rest = [i for i, v in enumerate(held) if v is _NOT_PLAIN]
        shape = (
            describe((args, kwargs), tensors, seen),
            self._plain,
            tuple([describe(state[i][2], tensors, seen) for i in self._rest]),
        )
        storages: dict[int, int] = {}
        traits = []
        before = [ref() for ref in self._seen]
        for i, tensor in enumerate(tensors):
            is_static = i < len(before) and before[i] is tensor
            traits.append(
                (traits_of(tensor), is_static, storages.setdefault(tensor.untyped_storage()._cdata, len(storages)))
            )
        self._seen = [weakref.ref(t) for t in tensors]
        recorder = current_recorder()
        about = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            tuple(id(p) for m in self._modules for p in m._parameters.values()),
            id(recorder),
            recorder.deriving if recorder is not None else None,
        )
        values = tuple(values_of(t) for t in tensors if not _torch.is_fake(t))
        return Entry((shape, tuple(traits), about), values, tensors, state)

    def state(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Returns the attributes and buffers of the modules: (table, name, value)."""
        found = []
        for module in self._modules:
            attributes, buffers = module.__dict__, module._buffers
            found += [(attributes, name, value) for name, value in attributes.items() if name not in _SKIPPED]
            if buffers:
                found += [(buffers, name, value) for name, value in buffers.items()]
        return found
