"""A model, and the random streams, as they are at one moment: to be put back after a trial, whatever happened."""

from __future__ import annotations

import collections
import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.recompute.rng_state import StreamState

_CONTAINERS = (list, dict, set, collections.deque)
_TABLES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """Modules' attributes and flags, what their lists and dicts hold, buffers and tensor attributes with their values,
    `.grad`s, torch's, python's, numpy's and explicit random streams; parameters' values only with `weights`.

    Objects stay the ones they are: a list is given its items back, a tensor its values.
    """

    def __init__(self, model: nn.Module, *, weights: bool = False) -> None:
        self._attributes = [(m, dict(m.__dict__)) for m in model.modules()]
        held = [v for m, attributes in self._attributes for v in attributes.values()]
        self._containers = list({id(v): (v, v.copy()) for v in held if isinstance(v, _CONTAINERS)}.values())
        tensors = [v for v in held if isinstance(v, torch.Tensor)]
        tensors += model.buffers()
        if weights:
            tensors += model.parameters()
        there = [t for t in tensors if t.device.type != "meta" and t.layout is torch.strided]
        self._values = list({id(t): (t, t.detach().clone()) for t in there}.values())
        self._gradients = [(p, p.grad) for p in model.parameters()]
        self._streams = StreamState(v for v in held if not isinstance(v, (*_CONTAINERS, torch.Tensor)))
        self._random = random_state()

    def restore(self) -> None:
        """Puts everything back."""
        for module, before in self._attributes:
            forward = {k: v for k, v in module.__dict__.items() if k == "forward"}  # a plan is not the step's doing
            module.__dict__.clear()
            module.__dict__.update({k: v for k, v in before.items() if k != "forward"} | forward)
        for container, copy in self._containers:
            _refill(container, copy)
        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._streams.restore()
        set_random_state(self._random)


def _refill(container: Any, copy: Any) -> None:
    if isinstance(container, dict):
        if container.keys() == copy.keys() and all(container[k] is copy[k] for k in copy):
            return
        container.clear()
        container.update(copy)
    elif isinstance(container, set):
        container.clear()
        container.update(copy)
    else:
        container.clear()
        container.extend(copy)


def random_state() -> tuple[Any, ...]:
    """Returns the global streams as they are now: torch's on the CPU and on CUDA devices, python's, numpy's."""
    cuda = torch.cuda.get_rng_state_all() if _torch.cuda_is_initialized() else None
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), cuda, random.getstate(), numpy.random.get_state() if numpy is not None else None


def set_random_state(state: tuple[Any, ...]) -> None:
    """Sets the global streams to what `random_state` returned."""
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores at the end what `Snapshot` holds."""
    before = Snapshot(model)
    try:
        yield
    finally:
        before.restore()
