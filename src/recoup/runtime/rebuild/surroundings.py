"""What recorded ops ran under besides autocast and autograd, put in place again where they run once more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from recoup import _torch

_num_dispatch_modes, _backward_id = _torch.num_dispatch_modes, _torch.current_backward_id  # asked at every rebuild
_thread_id = threading.get_ident


class Surroundings:
    """The user's dispatch modes and kernel flags that the recorded ops ran under."""

    __slots__ = ("_is_cheap", "_seen_in", "flags", "modes")

    def __init__(self, modes: tuple[Any, ...], *, is_cheap: bool) -> None:
        self.modes = modes
        self._is_cheap = is_cheap
        self.flags = _torch.backend_flags(cpu_only=is_cheap)
        self._seen_in: tuple[int, int] | None = None  # the backward, by thread, in which the flags were found so

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Runs what is inside under them and no others."""
        with _torch.under_modes(((), self.modes)), _torch.under_flags(self.flags):
            yield

    def are_here(self) -> bool:
        """Whether that changes nothing; the flags are looked at once in each backward."""
        if (self.modes or _num_dispatch_modes()) and not _torch.has_user_modes(self.modes):
            return False
        backward = _backward_id(), _thread_id()
        if backward != self._seen_in:
            if self.flags != _torch.backend_flags(cpu_only=self._is_cheap):
                return False
            self._seen_in = backward if backward[0] >= 0 else None
        return True
