"""To pinned host memory on a stream of its own: copies hide behind compute."""

from __future__ import annotations

from typing import Any

import torch


class CudaTransport:
    """Pinned buffers, kept and used again; one stream out, one back.

    Args:
        device: whose tensors are moved.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._out = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool: dict[int, list[torch.Tensor]] = {}

    def put(self, flat: torch.Tensor) -> Any:
        """See `Transport`."""
        spare = self._pool.get(flat.numel())
        host = spare.pop() if spare else torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(flat, non_blocking=True)
            flat.record_stream(self._out)  # its memory is not handed out again before the copy has read it
            done = self._out.record_event()
        return {"host": host, "out": done, "back": None}

    def prefetch(self, handle: Any) -> None:
        """See `Transport`."""
        if handle["back"] is not None:
            return
        # Taken on the stream that will read it, after what runs there now has let go of its memory.
        target = torch.empty(handle["host"].numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(handle["out"])
        with torch.cuda.stream(self._back):
            target.copy_(handle["host"], non_blocking=True)
            target.record_stream(self._back)
            handle["back"] = (target, self._back.record_event())

    def get(self, handle: Any) -> torch.Tensor:
        """See `Transport`."""
        self.prefetch(handle)
        target, done = handle["back"]
        handle["back"] = None
        torch.cuda.current_stream(self._device).wait_event(done)
        return target  # type: ignore[no-any-return]

    def drop(self, handle: Any) -> None:
        """See `Transport`."""
        host = handle["host"]
        handle["out"].synchronize()
        self._back.synchronize()
        self._pool.setdefault(host.numel(), []).append(host)
        handle.clear()

    def close(self) -> None:
        """See `Transport`."""
        torch.cuda.synchronize(self._device)
        self._pool.clear()
