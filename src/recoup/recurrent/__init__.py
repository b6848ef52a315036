"""Unrolled time: loops over steps, differentiated exactly in the memory of a few of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ScanReport": "recoup.recurrent.api",
    "checkpoint_timesteps": "recoup.recurrent.timesteps",
    "scan": "recoup.recurrent.api",
    "unroll": "recoup.recurrent.unrolling",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from recoup.recurrent.api import ScanReport as ScanReport
    from recoup.recurrent.api import scan as scan
    from recoup.recurrent.timesteps import checkpoint_timesteps as checkpoint_timesteps
    from recoup.recurrent.unrolling import unroll as unroll


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'recoup.recurrent' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
