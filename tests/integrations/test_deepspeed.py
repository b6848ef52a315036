"""The real DeepSpeed: its names, and its engine on a model with a plan, at every ZeRO stage, on two processes."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing

from tests.integrations import deepspeed_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = tmp_path_factory.mktemp("deepspeed") / "result.json"
    # In processes of their own: DeepSpeed logs, warns and sets up a process group for good.
    multiprocessing.spawn(deepspeed_job.main, (port, str(out)), nprocs=2)
    return json.loads(Path(out).read_text())


def test_names(result: Any) -> None:
    for name in ("configure", "checkpoint"):
        ours, theirs = result[f"parameters of {name}"]
        assert ours == theirs
    assert result["by hand"]["ours"] == result["by hand"]["theirs"] == result["by hand"]["plain"]


@pytest.mark.parametrize("zero", deepspeed_job.ZERO)
def test_engine(result: Any, zero: str) -> None:
    found = result["engine"][zero]
    assert found["planned"] == found["plain"]
    assert len(set(found["plain"])) == 4
    assert found["plain twice"] == [0, 0]
    regions, rederived = found["planned twice"]
    assert regions == 3 * 4
    assert rederived >= 10 * 4
