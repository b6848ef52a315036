"""The table of hazards: recoup is exact or refuses, row by row; torch's outcomes are what the table says."""

from __future__ import annotations

import pytest
from bench.hazards import OUTPUT, ROWS, Row, run_row


def _rows() -> list[Row]:
    assert len(ROWS) >= 50
    assert len({item.name for item in ROWS}) == len(ROWS)
    return ROWS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("item", _rows(), ids=lambda item: item.name)
def test_exact_or_refused(item: Row) -> None:
    outcome = run_row(item, "recoup")
    assert outcome.startswith(("exact", "refused")), outcome
    if outcome.startswith("refused: ReplayError"):
        assert "Region `" in outcome  # a refusal says where
    written = next(line for line in OUTPUT.read_text().splitlines() if line.startswith(f"| {item.name} |"))
    kind = written.split(" | ")[2].partition(":")[0].strip(" |")
    assert outcome.partition(":")[0] == kind, "docs/hazards.md is old: run `make hazards`"


def test_a_silently_wrong_row_would_be_seen() -> None:
    item = next(row for row in ROWS if row.name == "counter attribute read and raised in a region")
    assert run_row(item, "torch") == "silently wrong"
