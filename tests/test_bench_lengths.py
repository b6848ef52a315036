"""The law behind the table of lengths, held to whole simulated models."""

from __future__ import annotations

import pytest
from bench import lengths


@pytest.mark.slow
def test_the_law_of_few_layers_holds_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    method = "full"
    shape = {"intermediate_size": 256, "vocab_size": 512}
    monkeypatch.setattr(lengths, "_SHAPES", {"small": ("llama", 7, shape)})
    common = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    monkeypatch.setattr(lengths, "_COMMON", common)
    monkeypatch.setattr(lengths, "_NUM_TILES", 3)
    monkeypatch.setattr(lengths, "LENGTHS", (4096, 8192))
    found = lengths.laws("small", method, ["transformers", lengths.OURS])
    for name, law in found.items():
        one = lengths.planner("small", method, layers=7, tokens=16384, state_out=name in lengths.STATE_OUT)
        whole = one.simulate(lengths.recipes(7, 16384)[name])
        assert abs(law.peak_bytes(16384) / whole.peak_bytes - 1) < 0.02
        assert abs(law.host_bytes(16384) / max(whole.host_bytes, 1) - 1) < 0.01 or not whole.host_bytes
        assert law.seconds(16384) > law.seconds(8192) > 0
        assert law.peak_bytes(law.longest(1 << 34)) <= (1 << 34) - lengths.RESERVED_BYTES
    assert "| 24 GB |" in lengths.table("small", method, found)
