"""Measurements on disk: one file of JSON lines for each device, thread count, torch version and kernel flags.

The file is in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`, then `recoup`); `RECOUP_CACHE_DIR`
overrides it. It may be deleted at any time. A directory that cannot be written to only means measuring again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

_VERSION = 16  # of what is measured and how: another number finds nothing of older measurements


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of one op run alone.

    Attributes:
        seconds, spread_seconds: the least of its runs with cold caches, and how far their median lies above it.
        warm_seconds: the least of runs one after the other.
        workspace_bytes: what it holds while it runs and gives back before it returns.
        extra_output_bytes: what its outputs hold beyond what they show.
        is_rough: it ran once, since even that was little of the step it was measured for.
    """

    seconds: float
    warm_seconds: float
    spread_seconds: float
    workspace_bytes: int
    extra_output_bytes: int
    is_rough: bool = False


# None: it was tried, and made-up data cannot satisfy it.
Measurements = Mapping[str, Measurement | None]


def cache_path(device_name: str, *, threads: int, torch_version: str, flags: str = "") -> Path:
    """Returns the file for a device; nothing is created.

    Args:
        flags: settings under which another kernel may run (TF32, cuDNN's choice, determinism).
    """
    return _path("ops", device_name, str(threads), torch_version, flags, suffix=".jsonl")


def host_path(host_name: str, *, python_version: str, torch_version: str) -> Path:
    """Returns the file for the host's own costs; nothing is created."""
    return _path("host", host_name, python_version, torch_version, suffix=".json")


def capacity_path(host_name: str) -> Path:
    """Returns the file for a process's share of the host's last cache; nothing is created."""
    return _path("cache", host_name, suffix=".txt")


def _path(kind: str, *parts: str, suffix: str) -> Path:
    chosen = os.environ.get("RECOUP_CACHE_DIR")
    root = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recoup"
    text = "|".join((*parts, str(_VERSION)))
    return root / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"


def load(path: Path | None) -> dict[str, Measurement | None]:
    """Returns the file's measurements, for an op the last line; none if there is no file. Broken lines are skipped."""
    if path is None:
        return {}
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return {}
    found: dict[str, Measurement | None] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            key, entry = json.loads(line)
            found[str(key)] = None if entry is None else _measurement(*entry)
    return found


def _measurement(
    seconds: float,
    warm_seconds: float,
    spread_seconds: float,
    workspace_bytes: int,
    extra_output_bytes: int,
    is_rough: bool,
) -> Measurement:
    return Measurement(
        seconds=float(seconds),
        warm_seconds=float(warm_seconds),
        spread_seconds=float(spread_seconds),
        workspace_bytes=int(workspace_bytes),
        extra_output_bytes=int(extra_output_bytes),
        is_rough=bool(is_rough),
    )


def store(path: Path | None, measurements: Measurements, *, device_name: str, torch_version: str) -> None:
    """Appends to the file in one write, so that processes that measure at the same time do not lose each other's."""
    if path is None:
        return
    lines = [json.dumps([key, m and dataclasses.astuple(m)]) for key, m in measurements.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            if not file.tell():
                lines.insert(0, json.dumps({"device": device_name, "torch": torch_version}))
            # A line that a process left half written ends where this one begins.
            file.write("\n".join(["", *lines, ""]).encode())
    except OSError:
        return
