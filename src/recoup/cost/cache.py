"""Measurements on disk: one JSON file for each device, thread count, torch version and kernel flags.

The file is in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`, then `recoup`); `RECOUP_CACHE_DIR`
overrides it. It may be deleted at any time. A directory that cannot be written to only means measuring again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_VERSION = 8  # of what is measured and how: another number finds nothing of older measurements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of one op run alone.

    Attributes:
        seconds, spread_seconds: the least of its runs, and how far their median lies above it.
        workspace_bytes: what it holds while it runs and gives back before it returns.
        extra_output_bytes: what its outputs hold beyond what they show.
    """

    seconds: float
    spread_seconds: float
    workspace_bytes: int
    extra_output_bytes: int


# None: it was tried, and made-up data cannot satisfy it.
Measurements = Mapping[str, Measurement | None]


def cache_path(device_name: str, *, threads: int, torch_version: str, flags: str = "") -> Path:
    """Returns the file for a device; nothing is created.

    Args:
        flags: settings under which another kernel may run (TF32, cuDNN's choice, determinism).
    """
    chosen = os.environ.get("RECOUP_CACHE_DIR")
    root = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recoup"
    text = f"{device_name}|{threads}|{torch_version}|{flags}|{_VERSION}"
    return root / f"ops-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def load(path: Path | None) -> dict[str, Measurement | None]:
    """Returns the file's measurements; none if it is missing or cannot be read."""
    if path is None:
        return {}
    try:
        return {
            key: None
            if entry is None
            else Measurement(
                seconds=float(entry[0]),
                spread_seconds=float(entry[1]),
                workspace_bytes=int(entry[2]),
                extra_output_bytes=int(entry[3]),
            )
            for key, entry in json.loads(path.read_text())["ops"].items()
        }
    except (OSError, ValueError, TypeError, IndexError, KeyError, AttributeError):
        return {}


def store(path: Path | None, measurements: Measurements, *, device_name: str, torch_version: str) -> None:
    """Adds to the file in one move; what another process wrote meanwhile is kept where keys differ."""
    if path is None:
        return
    entries = {
        key: None if found is None else dataclasses.astuple(found)
        for key, found in (load(path) | dict(measurements)).items()
    }
    data = {"device": device_name, "torch": torch_version, "ops": entries}
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
