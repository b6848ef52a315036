"""The transport of captured steps: it records each copy, and moves data only where there is any."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from recoup import _torch
from recoup.capture.tracker import Tracker
from recoup.cost.host_link import MAX_BLOCKS_ON_THEIR_WAY
from recoup.ir.trace import Copy


class _Handle:
    """One storage that was moved: its bytes, if they are real, and the copy of it that is on its way back."""

    __slots__ = ("back", "block", "bytes_there", "device", "nbytes")

    def __init__(self, block: int, flat: torch.Tensor) -> None:
        self.block = block
        self.nbytes = flat.numel()
        self.device = flat.device
        self.bytes_there = None if _torch.is_fake(flat) else flat.detach().cpu().numpy().copy()
        self.back: torch.Tensor | None = None


class SimulatedTransport:
    """Stands in for the real transport while a step is captured.

    Args:
        tracker: told of every copy.
        prefetches: whether `prefetch` takes the memory at once, as on a GPU, or copies are made when they are waited
            for.
    """

    def __init__(self, tracker: Tracker, *, prefetches: bool) -> None:
        self._tracker = tracker
        self._prefetches = prefetches
        self._num_blocks = 0
        self._leaving: deque[torch.Tensor] = deque()

    def _note(self, kind: str, block: int, nbytes: int, storage: int | None) -> None:
        op = len(self._tracker.ops)
        copy = Copy(op=op, kind=kind, block=block, nbytes=nbytes, storage=-1 if storage is None else storage)  # type: ignore[arg-type]
        self._tracker.copies.append(copy)

    def put(self, flat: torch.Tensor) -> Any:
        """See `runtime.offload.transport.Transport`."""
        handle = _Handle(self._num_blocks, flat)
        self._num_blocks += 1
        self._note("out", handle.block, handle.nbytes, self._tracker.find(flat))
        if self._prefetches:
            self._leaving.append(flat)
            while len(self._leaving) > MAX_BLOCKS_ON_THEIR_WAY:
                self._leaving.popleft()
        return handle

    def prefetch(self, handle: Any) -> None:
        """See `runtime.offload.transport.Transport`."""
        if self._prefetches and handle.back is None:
            handle.back = self._bring(handle)

    def get(self, handle: Any) -> torch.Tensor:
        """See `runtime.offload.transport.Transport`."""
        back: torch.Tensor = self._bring(handle) if handle.back is None else handle.back
        handle.back = None
        self._note("wait", handle.block, handle.nbytes, None)
        return back

    def _bring(self, handle: Any) -> torch.Tensor:
        self._leaving.clear()
        self._note("back", handle.block, handle.nbytes, None)
        back = torch.empty(handle.nbytes, dtype=torch.uint8, device=handle.device)
        if handle.bytes_there is not None:
            back.copy_(torch.from_numpy(handle.bytes_there))
        index = self._tracker.find(back)
        if index is not None:
            self._tracker.storages[index].label = "offloaded tensor back"
        return back

    def close(self) -> None:
        """See `runtime.offload.transport.Transport`."""
