"""Ops measured in a separate process, which may die: a kernel that gets made-up data can crash it.

On a GPU an index out of range leaves a context that nothing runs in any more, and a host pointer where the device's is
meant is a segmentation fault. The parent knows which op the process was at, leaves it out and starts another.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from recoup.cost.cache import Measurement
from recoup.cost.kernel_flags import KernelFlags
from recoup.ir.trace import Signature
from recoup.thresholds import MEASURING_SECONDS

_COMMAND = (sys.executable, "-m", "recoup.cost.worker")
_SILENT_SECONDS = 5 * MEASURING_SECONDS  # without a line, its start included: it hangs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A worker's task: to measure `signatures` on `device` under `flags`, for about `seconds`."""

    device: str
    flags: KernelFlags
    signatures: tuple[Signature, ...]
    seconds: float


@dataclasses.dataclass(slots=True)
class Found:
    """A worker's answer.

    Attributes:
        measured: by position: None for ops that cannot be run alone, nothing for those there was no time for.
        deadly: positions of those that ended the process.
        failure: why no worker could start; "" if one did.
    """

    measured: dict[int, Measurement | None] = dataclasses.field(default_factory=dict)
    deadly: list[int] = dataclasses.field(default_factory=list)
    failure: str = ""


def measure_apart(
    request: Request, *, advance: Callable[[int], None] = lambda _: None, command: Sequence[str] = _COMMAND
) -> Found:
    """Returns the measurements of worker processes; if one dies, the next continues after the op that killed it.

    Args:
        advance: told how many ops are behind.
    """
    found, left, seconds = Found(), list(range(len(request.signatures))), request.seconds
    while left and seconds > 0:
        part = dataclasses.replace(request, signatures=tuple(request.signatures[i] for i in left), seconds=seconds)
        at, spent, is_done, errors = _run(part, left, found, advance, command)
        seconds -= spent
        if is_done:
            break
        if at is None:
            found.failure = errors.strip().rpartition("\n")[2] or "its process ended at once"
            break
        found.deadly.append(left[at])
        left = left[at + 1 :]
    return found


def _run(
    request: Request, positions: list[int], found: Found, advance: Callable[[int], None], command: Sequence[str]
) -> tuple[int | None, float, bool, str]:
    """Runs one worker; returns the op it reached, the seconds spent, whether it finished, and its error output."""
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    at: int | None = None
    spent, is_done = 0.0, False
    try:
        try:
            process.stdin.write(pickle.dumps(request))
            process.stdin.close()
        except BrokenPipeError:
            pass
        watchdog = threading.Timer(_SILENT_SECONDS, process.kill)
        watchdog.start()
        for line in process.stdout:
            watchdog.cancel()
            said = json.loads(line)
            spent = said["spent"]
            if "begins" in said:
                at = said["begins"]
                advance(positions[at])
            elif "measured" in said:
                found.measured[positions[said["position"]]] = (
                    None if said["measured"] is None else Measurement(**said["measured"])
                )
            else:
                is_done = True
            watchdog = threading.Timer(_SILENT_SECONDS, process.kill)
            watchdog.start()
        watchdog.cancel()
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()
    return at, spent, is_done, b"".join(errors).decode(errors="replace")
