"""Where the address space is too small for the plain step, `fit` and its command find a plan and prove it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recoup.units import parse_bytes
from tests.thorough import IS_THOROUGH, cases

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")]
_ROOT = Path(__file__).parents[2]
_ALL = ["llama", "unet", "resnet", "gpt2", "t5"]
_TARGETS = _ALL if IS_THOROUGH else _ALL[:1]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], dict[str, Any]]:
    """What happened to each target's plain step, fits and command, within 85 percent of what the plain step takes."""
    ours = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.evidence.limited_process", "85", *_TARGETS],
        env={**os.environ, **ours, "PYTHONPATH": path},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(row["target"], row["what"]): row for row in rows}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", cases(_ALL, _ALL[:1]))
def test_a_step_that_does_not_fit_is_fitted(target: str, found: dict[tuple[str, str], dict[str, Any]]) -> None:
    plain, command = found[target, "plain"], found[target, "cli"]
    assert plain.get("allocation_failure"), plain
    if target in _ALL[:2]:
        fit = found[target, "fit"]
        assert fit.get("ok"), fit
        assert fit["exactness"] == "bit-equal"
        assert "plain peak      does not fit" in fit["text"]
    assert command.get("status") == 0, command
    assert command["evidence"]["ok"] and command["evidence"]["baseline_peak_bytes"] is None


def test_what_cannot_be_says_how_much_is_needed(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    refused = found["mlp", "less"]
    assert refused.get("code") == "E209", refused
    needed, there = re.findall(r"([\d.]+ MiB)(?:\. | were there)", refused["message"])
    assert parse_bytes(needed.replace(" ", "")) > parse_bytes(there.replace(" ", ""))
