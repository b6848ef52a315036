"""Each page of docs/integrations shows a runnable file of under 40 lines, and it runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from tests.thorough import cases

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "accelerate_loop": "bit-equal",
    "compiled": "step 2 loss",
    "fsdp2": "rank 1 step 2 loss",
    "hf_trainer": "regions run twice",
    "lightning_fit": "regions run twice",
    "lora": "bit-equal",
    "mixed_precision": "bit-equal",
    "other_names": "gradients equal",
    "shapes": "It was not run",
    "trl_dpo": "regions run twice",
}

STARTS_PROCESSES = ("fsdp2",)  # which run this file again


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", cases(EXPECTED, [name for name in EXPECTED if name != "trl_dpo"]))
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / f"{name}.py"
    if name in STARTS_PROCESSES:
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        printed = done.stdout
    else:
        monkeypatch.chdir(tmp_path)
        AcceleratorState._reset_state(True)  # what an earlier test's trainer chose is not this program's choice
        runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    assert EXPECTED[name] in printed


def test_pages_show_the_files() -> None:
    shown = set()
    for page in sorted((ROOT / "docs" / "integrations").glob("*.md")):
        text = page.read_text()
        for name in re.findall(r"`examples/(\w+)\.py`", text):
            lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
            assert len(lines) < 40
            assert "\n".join(lines) in text  # the page shows the file as it is
            shown.add(name)
    assert shown == set(EXPECTED)
