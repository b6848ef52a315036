"""What is trained today, in examples of under 40 lines: each fits into 60 % of its peak, exactly."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import recoup
from tests.thorough import cases

_FOLDER = Path(__file__).parents[1] / "examples" / "today"
_NAMES = sorted(path.stem for path in _FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", cases(_NAMES, ["dit", "experts", "forces", "vision_language"]))
def test_it_fits(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("diffusers")
    if name == "forces":  # predicted 3.1 MiB, measured 3.9: what is rebuilt for a gradient's own graph stays in it
        reason = "peaks of rederive and rebuild are predicted too small where a step differentiates twice"
        request.applymarker(pytest.mark.xfail(raises=recoup.InfeasibleBudget, reason=reason, strict=True))
    target = runpy.run_path(str(_FOLDER / f"{name}.py"))["target"]()
    found = recoup.fit(**target, budget="60%", timed=False)
    print(found)
    assert found.evidence.ok and found.plan.decisions
    assert found.evidence.gradients_equal and found.evidence.max_gradient_error == 0
    assert found.evidence.peak_bytes <= found.plan.budget_bytes < 0.61 * found.plan.predicted.plain_peak_bytes


def test_examples_are_short() -> None:
    assert len(_NAMES) == 9
    for name in _NAMES:
        lines = [line for line in (_FOLDER / f"{name}.py").read_text().splitlines() if line.strip()]
        assert len(lines) < 40, name
