"""Runs steps and fits in processes whose address space is limited; prints one JSON line for each.

Each is a fork of one process that has everything imported: what a limit leaves is for the step, not for libraries.

    python -m tests.evidence.limited_process PERCENT TARGET...
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.models.auto.modeling_auto  # noqa: F401 - as much of the libraries as can be in all processes

from recoup import api
from recoup._allocation import is_allocation_failure, return_freed_memory
from recoup.cli.main import run
from recoup.errors import RecoupError
from tests.evidence import limited_targets

Found = dict[str, Any]
_BUDGET = "50%"
_NO_LIMIT_BYTES = 1 << 40
_TOO_LITTLE_BYTES = 96 << 20


def main(percent: int, names: list[str]) -> None:
    """Prints for each target what its plain step takes, and what becomes of it within `percent` of that."""
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Found]] = {name: getattr(limited_targets, name) for name in names}
    for make in makers.values():  # imports what it needs
        make()
    here = _status_bytes("VmSize")
    for name, make in makers.items():
        plain = _in_a_fork(partial(_plain, make), _NO_LIMIT_BYTES)
        _tell(name, "unlimited", plain)
        limit = here + (plain["peak_bytes"] - here) * percent // 100
        _tell(name, "plain", _in_a_fork(partial(_plain, make), limit))
        if name in names[:2]:  # the command does the same, in a little more
            _tell(name, "fit", _in_a_fork(partial(_fit, make), limit))
        _tell(name, "cli", _in_a_fork(partial(_command, name), limit))
    _tell("mlp", "less", _in_a_fork(partial(_fit, limited_targets.mlp), room_bytes=_TOO_LITTLE_BYTES))


def _plain(make: Callable[[], Found]) -> Found:
    made = make()
    return_freed_memory()  # a plain step that has the best of allocators
    try:
        batch = made["batch"]
        output = made["model"](**batch) if isinstance(batch, dict) else made["model"](batch)
        (made["loss"](output, batch) if "loss" in made else output.loss).backward()
    except Exception as error:
        return {"allocation_failure": is_allocation_failure(error), "message": str(error)}
    return {"peak_bytes": _status_bytes("VmPeak")}


def _fit(make: Callable[[], Found]) -> Found:
    try:
        fitted = api.fit(**make(), budget=_BUDGET, timed=False)
    except RecoupError as error:
        return {"code": error.code, "message": str(error)}
    return {"ok": fitted.evidence.ok, "exactness": fitted.evidence.exactness, "text": str(fitted)}


def _command(name: str) -> Found:
    with tempfile.TemporaryFile("w+") as out:
        os.dup2(out.fileno(), 1)
        status = run(["fit", f"{limited_targets.__file__}:{name}", "--budget", _BUDGET, "--json", "--quiet"])
        sys.stdout.flush()
        out.seek(0)
        text = out.read()
    return {"status": status, "evidence": json.loads(text)["evidence"] if status == 0 else text}


def _in_a_fork(call: Callable[[], Found], limit_bytes: int = 0, *, room_bytes: int = 0) -> Found:
    """Returns what a call returns within a limit, or with so much room above what is taken before it."""
    with tempfile.NamedTemporaryFile("r") as answer:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.zeros((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]  # autograd's threads
                limit_bytes = limit_bytes or _status_bytes("VmSize") + room_bytes
                resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
                Path(answer.name).write_text(json.dumps(call()))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return json.loads(answer.read()) if status == 0 else {"died": status}


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def _tell(target: str, what: str, found: Found) -> None:
    print(json.dumps({"target": target, "what": what, **found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
