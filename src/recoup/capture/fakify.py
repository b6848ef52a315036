"""A model on fake parameters for the duration (inside `snapshot.untouched`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors, map_tensors
from recoup._storages import covered_range, sharing_memory
from recoup.capture.island import Island
from recoup.thresholds import ASIDE_ELEMENTS


def fake_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a tensor of the same shape, strides and dtype; call under the fake mode.

    One that is not strided (sparse) comes back itself: what an op makes of it depends on what is in it.
    """
    if _torch.is_wrapper_type(type(tensor)):
        return _torch.rewrapped(tensor, lambda part: fake_like(part, device))
    if tensor.layout is not torch.strided:
        return tensor
    return _torch.fake_empty_like(tensor, device)


@contextlib.contextmanager
def fake_parameters(model: nn.Module, device: str, island: Island) -> Iterator[dict[str, torch.Tensor]]:
    """Puts fake parameters and buffers in place (tied ones stay tied) for the duration; enter under the fake mode.

    Of small integer buffers that are really there the values stay known: position tables and the like may be looked at.

    Yields:
        The new parameters by path, each once.
    """
    made: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    before: list[tuple[Any, str, torch.Tensor]] = []
    try:
        for path, module in model.named_modules():
            # A ScriptModule's tables are windows on what TorchScript holds: nothing else remembers what was there.
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                fake = made.get(id(parameter))
                if fake is None:
                    fake = _torch.as_fake_parameter(fake_like(parameter, device), requires_grad=parameter.requires_grad)
                    made[id(parameter)] = fake
                    named[f"{path}.{name}" if path else name] = fake
                before.append((module._parameters, name, parameter))
                module._parameters[name] = fake  # type: ignore[assignment]
            for name, buffer in list(module._buffers.items()):
                if buffer is None:
                    continue
                fake = made.get(id(buffer))
                if fake is None:
                    fake = island.admit(_on_host(buffer)) if _is_looked_at(buffer) else fake_like(buffer, device)
                    made[id(buffer)] = fake
                before.append((module._buffers, name, buffer))
                module._buffers[name] = fake
        yield named
    finally:
        for table, name, tensor in reversed(before):
            table[name] = tensor
        named.clear()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with _torch.without_dispatch_modes():
        return tensor.detach().cpu()


def _is_looked_at(buffer: torch.Tensor) -> bool:
    return (
        buffer.device.type != "meta"
        and not buffer.is_floating_point()
        and not buffer.is_complex()
        and buffer.layout is torch.strided
        and 1 < buffer.numel() <= ASIDE_ELEMENTS
    )


def fake_batch(batch: Any, device: str, island: Island) -> Any:
    """Returns the batch for a fake step: floating tensors fake, integer and boolean ones with copies of their values.

    Integers without data (on `meta`) become zeros, booleans become True. Call under the fake mode.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided:
            return fake_like(tensor, device)
        with _torch.without_dispatch_modes():
            if tensor.device.type == "meta":
                fill = torch.ones if tensor.dtype == torch.bool else torch.zeros
                host = fill(tensor.shape, dtype=tensor.dtype)
            else:
                host = tensor.detach().cpu().clone()
        return island.admit(host)

    return _copied(batch, copy)


def real_batch(batch: Any) -> Any:
    """Returns a copy of the batch for a real step."""
    return _copied(batch, lambda t: t.detach().clone())


def _copied(batch: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the batch with its tensors copied; what lies in the same memory does so again, and nothing beside it.

    A slice of a data set becomes as large as the slice.
    """
    tensors = list({id(t): t for t in iterate_tensors(batch)}.values())
    shareable = [t for t in tensors if type(t) is torch.Tensor and t.layout is torch.strided]
    made: dict[int, torch.Tensor] = {}
    for group in sharing_memory(shareable):
        if len(group) > 1 and len({t.dtype for t in group}) == 1:
            made |= _copied_together(group, copy)
    for tensor in tensors:
        copied = made.get(id(tensor))
        made[id(tensor)] = (copy(tensor) if copied is None else copied).requires_grad_(tensor.requires_grad)
    return map_tensors(lambda t: made[id(t)], batch)


def _copied_together(
    group: list[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[int, torch.Tensor]:
    size = group[0].dtype.itemsize
    ranges = [covered_range(t) for t in group]
    first, last = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    with _torch.without_dispatch_modes():
        whole = group[0].detach().as_strided(((last - first) // size,), (1,), first // size)
    flat = copy(whole)
    offset = flat.storage_offset()
    return {
        id(t): flat.as_strided(t.size(), t.stride(), offset + (begin - first) // size).detach()
        for t, (begin, _) in zip(group, ranges, strict=True)
    }
