"""What recorded ops ran under besides autocast and autograd, put in place again where they run once more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from recoup import _torch


class Surroundings:
    """The user's dispatch modes and kernel flags that the recorded ops ran under."""

    __slots__ = ("_is_cheap", "flags", "modes")

    def __init__(self, modes: tuple[Any, ...], *, is_cheap: bool) -> None:
        self.modes = modes
        self._is_cheap = is_cheap
        self.flags = _torch.backend_flags(cpu_only=is_cheap)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Runs what is inside under them and no others."""
        with _torch.under_modes(((), self.modes)), _torch.under_flags(self.flags):
            yield

    def are_here(self) -> bool:
        """Whether that changes nothing."""
        return _torch.has_user_modes(self.modes) and self.flags == _torch.backend_flags(cpu_only=self._is_cheap)
