"""The law behind the table of lengths, held to a whole simulated model."""

from __future__ import annotations

import pytest
import torch
from bench import lengths

from recoup.capture.step import make_objective
from recoup.planner.request import planner_for
from tests.thorough import thorough


@pytest.mark.slow
@thorough
def test_the_law_of_few_layers_holds_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"intermediate_size": 256, "vocab_size": 512}
    monkeypatch.setattr(lengths, "_SHAPES", {"small": ("llama", 6, shape)})
    common = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    monkeypatch.setattr(lengths, "_COMMON", common)
    monkeypatch.setattr(lengths, "LENGTHS", (4096, 8192, 16384))
    monkeypatch.setattr(lengths, "_DEPTHS", (2, 4))
    law = lengths.laws("small", "QLoRA", ["recoup"])["recoup"]
    assert law.error < 0.02
    model, batch = lengths.make("small", "QLoRA", layers=6, tokens=32768)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "down" not in name and "up" not in name)
    objective, given = make_objective(batch)
    planner, _, _ = planner_for(
        model,
        given,
        objective=objective,
        optimizer=torch.optim.AdamW,
        device="h100-sxm",
        actions=("offload",),
        cost=None,
    )
    peak = planner.simulate(lengths.recipes(6)["recoup"]).peak_bytes
    assert abs(law.fixed_bytes + law.token_bytes * 32768 - peak) < 0.05 * peak
