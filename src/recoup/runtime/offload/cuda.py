"""Copies to pinned host memory on a side stream: they overlap with compute, and the host never synchronises.

Streams wait for events. One stream makes all copies of both directions in order, so that a host buffer may be reused at
once: the copy into it comes after the copy out of it. `record_stream` is not used: the allocator would reuse the memory
only after the *host* has seen that the copy is done, and a host that runs ahead would allocate more and more. Instead a
tensor being copied out is held until its stream was told to wait for the copy. Only a few are copied out at a time, so
that a slow link costs time and not memory.
"""

from __future__ import annotations

from collections import deque

import torch

from recoup._allocation import HostRoom
from recoup.cost.host_link import MAX_BLOCKS_ON_THEIR_WAY
from recoup.runtime.waiting import Gone
from recoup.thresholds import SAME_SHARE


class _Handle:
    """Refers to a block; its host memory is reused once the handle is gone."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: _Block) -> None:
        self.block = block


class _Block:
    """One block: its pieces of host memory, and the tensors being copied.

    Attributes:
        leaving: the tensor that is being copied out.
        back: the tensor that is being copied back.
        done: event recorded after the latest copy.
        stream: the stream that uses both tensors.
    """

    __slots__ = ("back", "done", "leaving", "nbytes", "pieces", "stream")

    def __init__(self, flat: torch.Tensor, pieces: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
        self.nbytes = flat.numel()
        self.pieces = pieces
        self.stream = stream
        self.leaving: torch.Tensor | None = flat
        self.back: torch.Tensor | None = None
        self.done: torch.cuda.Event | None = None

    def settle(self) -> None:
        """Makes the stream wait for the latest copy, and frees the tensor that was copied out."""
        if self.done is not None:
            self.stream.wait_event(self.done)
        self.leaving = self.done = None


class CudaTransport:
    """Moves bytes to pinned memory, which is kept and reused.

    Args:
        device: GPU whose tensors are moved.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: dict[int, list[torch.Tensor]] = {}
        self._leaving: deque[_Block] = deque()
        self._gone = Gone()
        self._room = HostRoom()

    def put(self, flat: torch.Tensor) -> _Handle:
        """See `Transport`."""
        self._take_back()
        stream = torch.cuda.current_stream(self._device)
        block = _Block(flat, [self._piece(size) for size in piece_sizes(flat.numel())], stream)
        self._side.wait_stream(stream)
        self._copy(block, flat, out=True)
        self._leaving.append(block)
        while len(self._leaving) > MAX_BLOCKS_ON_THEIR_WAY:
            self._leaving.popleft().settle()
        handle = _Handle(block)
        self._gone.watch(handle, block)
        return handle

    def prefetch(self, handle: _Handle) -> None:
        """See `Transport`."""
        block = handle.block
        if block.back is not None:
            return
        self._take_back()
        self._settle()
        # Allocated on the stream that will read it, so that memory freed there by then can be reused.
        block.stream = torch.cuda.current_stream(self._device)
        block.back = torch.empty(block.nbytes, dtype=torch.uint8, device=self._device)
        self._side.wait_stream(block.stream)
        self._copy(block, block.back, out=False)

    def get(self, handle: _Handle) -> torch.Tensor:
        """See `Transport`."""
        self.prefetch(handle)
        block = handle.block
        back, block.back = block.back, None
        block.settle()
        assert back is not None
        return back

    def close(self) -> None:
        """See `Transport`; torch keeps pinned memory until the copies from and to it are done."""
        self._take_back()
        self._settle()
        self._pool.clear()

    def _take_back(self) -> None:
        for block in self._gone.take():
            block.settle()
            block.back = None
            for piece in block.pieces:
                self._pool.setdefault(piece.numel(), []).append(piece)

    def _settle(self) -> None:
        while self._leaving:
            self._leaving.popleft().settle()

    def _piece(self, size: int) -> torch.Tensor:
        if spare := self._pool.get(size):
            return spare.pop()
        self._room.check(size, "a tensor that the plan offloads")
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy(self, block: _Block, flat: torch.Tensor, *, out: bool) -> None:
        """Copies a block piece by piece on the side stream, after the work already queued on the tensor's stream."""
        begin = 0
        with torch.cuda.stream(self._side):
            for piece in block.pieces:
                part = flat[begin : begin + piece.numel()]
                begin += part.numel()
                if out:
                    piece[: part.numel()].copy_(part, non_blocking=True)
                else:
                    part.copy_(piece[: part.numel()], non_blocking=True)
            block.done = self._side.record_event()


def piece_sizes(nbytes: int) -> list[int]:
    """Returns sizes in bytes, powers of two, that together hold a block.

    torch rounds a pinned allocation up to a power of two: 270 MiB to 512. Of so many bytes, rounding up the last piece
    adds less than `SAME_SHARE`, or a page.
    """
    finest = 1 << max(int(nbytes * SAME_SHARE).bit_length() - 1, 12)
    left = -(-nbytes // finest) * finest
    sizes = []
    while left:
        sizes.append(1 << (left.bit_length() - 1))
        left -= sizes[-1]
    return sizes
