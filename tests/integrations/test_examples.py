"""Each page of docs/integrations shows a runnable file of under 40 lines, and it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert EXPECTED[name] in done.stdout


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
