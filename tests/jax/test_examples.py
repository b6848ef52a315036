"""Each example of a library runs, and its gradients are the plain ones'."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.thorough import cases

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("jax_scan", "jax_equinox", "jax_flax", "jax_rnn")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", cases(NAMES, [name for name in NAMES if name != "jax_flax"]))
def test_the_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    said = capsys.readouterr().out
    if "largest difference of a gradient" in said:
        assert float(said.rsplit(": ", 1)[1]) < 1e-5
    else:
        assert "bit-equal to plain" in said or "equal up to rounding" in said
