"""A model on fake parameters for the duration (inside `snapshot.untouched`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import map_tensors
from recoup.capture.island import Island

_INTEGER_BUFFER_ELEMENTS = 1 << 22


def fake_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Returns a tensor of the same shape, strides and dtype; call under the fake mode."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def swap_parameters(model: nn.Module, device: str, island: Island) -> dict[str, torch.Tensor]:
    """Puts fake parameters and buffers in place (tied ones stay tied); call under the fake mode, inside `untouched`.

    Of small integer buffers that are really there the values stay known: position tables and the like may be looked at.

    Returns:
        The new parameters by path, each once.
    """
    made: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            fake = made.get(id(parameter))
            if fake is None:
                fake = nn.Parameter(fake_like(parameter, device), requires_grad=parameter.requires_grad)
                made[id(parameter)] = fake
                named[f"{path}.{name}" if path else name] = fake
            module._parameters[name] = fake  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            fake = made.get(id(buffer))
            if fake is None:
                fake = island.admit(_on_host(buffer)) if _is_looked_at(buffer) else fake_like(buffer, device)
                made[id(buffer)] = fake
            module._buffers[name] = fake
    return named


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with _torch.without_dispatch_modes():
        return tensor.detach().cpu()


def _is_looked_at(buffer: torch.Tensor) -> bool:
    return (
        buffer.device.type != "meta"
        and not buffer.is_floating_point()
        and not buffer.is_complex()
        and 1 < buffer.numel() <= _INTEGER_BUFFER_ELEMENTS
    )


def fake_batch(batch: Any, device: str, island: Island) -> Any:
    """Returns the batch for a fake step: floating tensors fake, integer and boolean ones with copies of their values.

    Integers without data (on `meta`) become zeros, booleans become True. Call under the fake mode.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return fake_like(tensor, device).requires_grad_(tensor.requires_grad)
        with _torch.without_dispatch_modes():
            if tensor.device.type == "meta":
                fill = torch.ones if tensor.dtype == torch.bool else torch.zeros
                host = fill(tensor.shape, dtype=tensor.dtype)
            else:
                host = tensor.detach().cpu().clone()
        return island.admit(host)

    return map_tensors(convert, batch)
