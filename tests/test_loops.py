"""Training scripts as a new user writes them, from the README alone: the same losses with a plan as without."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

import recoup

_SCRIPTS = sorted((Path(__file__).parents[1] / "examples" / "loops").glob("*.py"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.stem)
def test_twenty_steps_lose_the_same_inside_the_budget(script: Path) -> None:
    train = runpy.run_path(str(script))["train"]
    plain, _ = train()
    with warnings.catch_warnings():
        for category in (recoup.OverBudgetWarning, recoup.OtherStepWarning, recoup.InexactWarning):
            warnings.simplefilter("error", category)
        planned, fit = train("85%")
    assert len(planned) >= 20
    assert planned == plain
    plan = fit.plan
    assert plan.decisions
    assert plan.predicted.peak_bytes <= plan.budget_bytes < plan.predicted.plain_peak_bytes
    if hasattr(fit, "evidence"):
        assert fit.evidence.ok
        assert fit.evidence.peak_bytes <= plan.budget_bytes


def test_scripts_are_short() -> None:
    assert len(_SCRIPTS) == 12
    for script in _SCRIPTS:
        lines = [line for line in script.read_text().splitlines() if line.strip()]
        assert len(lines) < 40, script.name
