"""The tutorials' cells run, and what they assert holds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))


def _cells(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_tutorials_are_there_without_outputs() -> None:
    assert {path.stem for path in TUTORIALS} == {"own_loop", "lora_24gb", "batch_norm", "spiking", "fsdp_eight"}
    for path in TUTORIALS:
        cells = json.loads(path.read_text())["cells"]
        assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
        assert not any(cell.get("outputs") for cell in cells)
        assert sum(source.count("assert ") for source in _cells(path)) >= 1
        assert sum(len(source.splitlines()) for source in _cells(path)) < 80


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{path.stem}.py"
    program.write_text("\n\n".join(_cells(path)))
    runpy.run_path(str(program), run_name="__main__")
