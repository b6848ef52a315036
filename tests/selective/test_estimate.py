"""The table of LLaMA-7B: formulas by hand, true bytes against whole captures."""

from __future__ import annotations

import pytest

from recoup.errors import UsageError
from recoup.selective import estimate as estimates
from recoup.units import GIB


def test_formulas() -> None:
    shape = estimates.MODELS["llama-7b"]
    s, b, d, f, h = 2048, 8, 4096, 11008, 32
    by_hand = 32 * 2 * (6 * s * b * d + s * s * b * h + s * b * f)
    assert estimates.textbook_bytes(shape, s, b) == by_hand
    assert estimates.textbook_bytes(shape, s, b, layers=32 / 5 + 5) == int(by_hand / 32 * (32 / 5 + 5))
    assert round(estimates.rule_of_thumb_bytes(shape, s, b) / 1e9, 1) == 51.5
    assert round(by_hand / GIB, 2) == 98.75


def test_unknown_models_are_refused() -> None:
    with pytest.raises(UsageError, match="Known: llama-7b"):
        estimates.estimate("llama-9000b")


@pytest.mark.slow
def test_the_table_agrees_with_whole_captures_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    small = estimates.Shape(num_layers=11, width=64, num_heads=4, feed_forward=176, vocabulary=512)
    monkeypatch.setitem(estimates.MODELS, "llama-7b", small)
    cells = estimates.estimate("llama-7b", sequences=(1536,), batches=(1, 4))
    for cell in cells:
        assert "as the table says" in estimates.check_cell("llama-7b", cell)
        assert cell.every_block < cell.sqrt < cell.plain
        assert cell.planned < cell.every_block and cell.rederived < cell.plain
    text = estimates.format_estimates("llama-7b", cells)
    assert all(len(line) <= 110 for line in text.splitlines())
