"""The real DeepSpeed, where it is installed: its names, and its engine on a model with a plan."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


def test_names_and_engine() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    code = (  # in a process of its own: DeepSpeed logs, warns and sets up a process group for good
        f"import os, json; os.environ['MASTER_PORT'] = '{port}'; os.environ['GLOO_SOCKET_IFNAME'] = 'lo'\n"
        "from tests.integrations.deepspeed_job import main; print('RESULT ' + json.dumps(main()), flush=True)"
    )
    done = subprocess.run(  # the first time DeepSpeed compiles its communication op, for a minute or more
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    for name in ("configure", "checkpoint"):
        ours, theirs = result[f"parameters of {name}"]
        assert ours == theirs
    assert result["by hand"]["ours"] == result["by hand"]["theirs"] == result["by hand"]["plain"]
    assert result["engine"]["planned"] == result["engine"]["plain"]
    assert result["engine"]["planned regions"] == 4 * 4
    assert len(set(result["engine"]["plain"])) == 4
