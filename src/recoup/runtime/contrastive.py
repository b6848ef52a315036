"""A loss over all pairs of a large batch whose towers run in chunks.

In contrastive training every example of the batch is a negative of every other, so the batch cannot be split into
micro-batches. But a tower treats each example independently. So each chunk of a tower's batch is a region
(`recompute/`): it keeps its inputs and embeddings, and reruns its forward in backward from the same random state, with
only that chunk's activations alive. The loss sees all embeddings at once. GradCache (Gao et al., arXiv 2101.06983)
splits a step into two passes by hand for this; here it is one graph, so that any loss of the embeddings, also one with
parameters, gets the gradients of the undivided step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from recoup._pytree import map_tensors, num_rows
from recoup._reachable import Reached
from recoup.errors import UsageError
from recoup.runtime.recompute.region import run_region
from recoup.runtime.recompute.region_step import Member

_WHERE = "(recoup.runtime.contrastive)"


def contrastive(
    loss: Callable[..., torch.Tensor], *towers: tuple[Callable[..., torch.Tensor], Any], chunk_size: int
) -> torch.Tensor:
    """Returns `loss(a, b, ...)` of the towers' embeddings of whole batches, keeping one chunk's activations at a time.

    Memory: inputs, embeddings, the loss over all pairs, and the activations of one chunk of one tower. Time: one more
    forward of the towers. Gradients are those of towers that were run chunk by chunk with everything kept: the same
    dropout masks, buffers updated once, and the same bits where the kernels are deterministic. They differ from one
    call on the whole batch by rounding (and by the random numbers that dropout draws for smaller tensors).

    Args:
        loss: function of one embedding (N, D) a tower; it may close over parameters of its own (a temperature).
        *towers: (tower, batch) pairs. A tower is a module or function that returns an embedding (N, D), each row from
            its own example alone; a module may be in several towers. A dict as batch becomes `tower(**batch)`, a tuple
            or list `tower(*batch)`, anything else `tower(batch)`. Tensors of N rows, N being the most rows of any, are
            split into chunks; every chunk gets all other values whole.
        chunk_size: examples in a chunk.

    Returns:
        The value of `loss`; call `backward()` on it as usual. Under `no_grad` nothing runs twice.

    Raises:
        UsageError: if a tower has a BatchNorm in training mode, whose statistics are over the whole batch, or does not
            return one row for each example.

    Example:
        >>> image, text = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)
        >>> def loss(a, b):
        ...     return torch.nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))
        >>> recoup.contrastive(loss, (image, torch.randn(32, 8)), (text, torch.randn(32, 6)), chunk_size=8).backward()
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise UsageError(f"contrastive: chunk_size must be a whole number of at least 1; got {chunk_size!r}. {_WHERE}")
    if not towers:
        raise UsageError(f"contrastive: give at least one (tower, batch) pair. {_WHERE}")
    members = [_checked(number, tower) for number, tower in enumerate(towers)]
    embeddings = []
    for member, (_, batch) in zip(members, towers, strict=True):
        total = num_rows(batch)
        if not total:
            raise UsageError(f"contrastive: the batch of {member.path} holds no tensor with examples. {_WHERE}")
        embedded = []
        for start in range(0, total, chunk_size):
            wanted = min(chunk_size, total - start)
            args, kwargs = _call(_cut(batch, total, start, wanted))
            rows = run_region(member, member.module().forward, args, kwargs)
            if not isinstance(rows, torch.Tensor) or rows.dim() == 0 or len(rows) != wanted:
                found = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
                raise UsageError(
                    f"contrastive: {member.path} returned {found} for {wanted} examples; it has to return a tensor "
                    f"with a row an example. Take the embedding out of the output in a function. {_WHERE}"
                )
            embedded.append(rows)
            del args, kwargs, rows
        embeddings.append(torch.cat(embedded))
    return loss(*embeddings)


class _Tower(nn.Module):
    """A tower as one module; its children are the modules that its function reaches, whose state a replay restores."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        for number, module in enumerate(_modules_of(function)):
            self.add_module(str(number), module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["function"](*args, **kwargs)


def _checked(number: int, tower: Any) -> Member:
    """Returns the region that a tower's chunks run in.

    Raises:
        UsageError: if the tower is not callable, or its result depends on other examples of the batch.
    """
    if not isinstance(tower, tuple) or len(tower) != 2 or not callable(tower[0]):
        raise UsageError(f"contrastive: tower {number} must be a (module or function, batch) pair. {_WHERE}")
    function = tower[0]
    path = f"tower {number} ({getattr(function, '__name__', type(function).__name__)})"
    module = _Tower(function)
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and child.training:
            raise UsageError(
                f"contrastive: `{name.partition('.')[2] or name}` of {path}, a {type(child).__name__}, is in training "
                "mode: its statistics are over the batch, so chunks would give another loss. Put it in eval mode, or "
                f"use GroupNorm or LayerNorm. {_WHERE}"
            )
    return Member(path=path, module=lambda: module, buffers=(), derives=False, derives_by_default=False)


def _modules_of(function: Callable[..., Any]) -> Iterator[nn.Module]:
    """Yields the modules that a function runs: itself, the one whose method it is, and those it closes over."""
    if isinstance(function, nn.Module):
        yield function
        return
    owner = getattr(function, "__self__", None)
    if inspect.ismethod(function) and isinstance(owner, nn.Module):
        yield owner
        return
    found = Reached({"tower": function}).modules()
    inside = {id(child) for module in found for child in module.modules() if child is not module}
    yield from (module for module in found if id(module) not in inside)


def _cut(batch: Any, total: int, start: int, size: int) -> Any:
    return map_tensors(lambda t: t[start : start + size] if t.dim() > 0 and len(t) == total else t, batch)


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})
