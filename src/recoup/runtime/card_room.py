"""Has torch take what a planned step needs of a card in one piece, before the step.

The caching allocator takes a segment for each large block that finds no room, and segments do not join: activations of
many sizes leave a card in pieces, a tenth to a third of it, and how many depends on what the process did before. Blocks
cut from one piece join again when they are freed. So when the first step begins, what is cached is let go, and one
block is allocated and freed that brings what torch has reserved to what the plan names. Tensors, values and the order
of kernels are as they were; memory that is not in use stays torch's to give away, or back.

1. Before a training step, and before no other forward: a card that only evaluates is left alone.
2. Again where less is reserved than then: somebody emptied the cache.
3. Never more than the card, or the limit of this process, has: then all is as without this.
4. Not where segments are expandable: those join.
5. cuBLAS's workspaces are let go before: where one lies in a large segment that an earlier step had, a proof's for
   example, it holds all of that. The next product of matrices takes them anew. Not where a CUDA graph was captured:
   its kernels would go on using them.
6. The block was no tensor of the step, so the allocator's peaks begin anew behind it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._allocation import available_bytes
from recoup.runtime import execution_context
from recoup.thresholds import SAME_SHARE


class CardRoom:
    """Reserves memory for the steps of one model; `remove` ends it.

    Args:
        room_bytes: what torch should have reserved on the model's device when a step begins, 0 if it does not matter.
        card_bytes: what the step then needs in all.
    """

    def __init__(self, model: nn.Module, room_bytes: int, card_bytes: int) -> None:
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._room_bytes = room_bytes
        self._needed_bytes = max(room_bytes, int(card_bytes / (1 + SAME_SHARE)))
        self._is_first = True
        self._removers: list[Any] = []
        if room_bytes and self._device.type == "cuda" and not _torch.has_expandable_segments():
            self._removers.append(model.register_forward_pre_hook(self._begin))

    def __deepcopy__(self, memo: dict[int, Any]) -> CardRoom:
        return _without_room()

    def __reduce__(self) -> Any:
        return _without_room, ()

    def remove(self) -> None:
        """Ends it; what is reserved stays with torch."""
        while self._removers:
            self._removers[-1].remove()
            self._removers.pop()

    def _begin(self, model: nn.Module, args: Any) -> None:
        """Before a forward of the model."""
        if torch.compiler.is_compiling() or not self._removers or not torch.is_grad_enabled() or not model.training:
            return
        if execution_context.is_recomputing() or execution_context.observer() is not None or _torch.inside_transform():
            return
        if torch.cuda.is_current_stream_capturing():
            return
        if not self._is_first and _torch.cuda_reserved_bytes(self._device) >= self._room_bytes:
            return
        self._is_first = False
        with torch.cuda.device(self._device):
            if self._needed_bytes > available_bytes(self._device) + torch.cuda.memory_allocated():
                return
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if all(segment["segment_pool_id"] == (0, 0) for segment in segments):
                _torch.clear_cublas_workspaces()
            torch.cuda.empty_cache()
            missing = self._room_bytes - _torch.cuda_reserved_bytes(self._device)
            if missing > 0:
                with contextlib.suppress(torch.OutOfMemoryError):
                    _torch.grow_cuda_cache(missing)
                torch.cuda.reset_peak_memory_stats()


def _without_room() -> CardRoom:
    return CardRoom(nn.Module(), 0, 0)
