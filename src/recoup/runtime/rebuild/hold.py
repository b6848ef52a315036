"""A mark in the model's code for plans by tensor: what is dear is held, never rebuilt."""

from __future__ import annotations

import torch

from recoup.errors import UsageError


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor as dear to compute: a plan by tensor (`rebuild`) holds it where something is rebuilt from it.

    Without such a plan it changes nothing. It costs the tensor's bytes from forward to backward, and saves running
    again the op that made it and what leads to that.

    Args:
        tensor: of any shape and dtype, the result of an op.

    Returns:
        The same values in the same memory: a view. Gradients pass through.

    Raises:
        UsageError: for what is no tensor.

    Example:
        >>> scores = torch.randn(8, 100)
        >>> recoup.hold(scores.topk(2).indices).shape
        torch.Size([8, 2])
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"hold takes a tensor; got {type(tensor).__name__}. (recoup.runtime.rebuild.hold)")
    held: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return held
