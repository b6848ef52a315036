"""max_tokens: what it returns fits under a plan, and the next size of the search does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.cli.main import run
from recoup.errors import InfeasibleBudget, UsageError
from tests.thorough import cases

_VOCABULARY = 64
_SMALL = {"vocab_size": _VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class _Words(nn.Module):
    """Words to words through a middle of some kind."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, 16)
        self.middle = middle
        self.head = nn.Linear(16, _VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.middle(self.words(ids))
        made = made[0] if isinstance(made, tuple) else made
        return nn.functional.cross_entropy(self.head(made).flatten(0, -2), ids.flatten())


def _model(name: str) -> nn.Module:
    if name == "words":
        return _Words(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16)))
    if name == "gru":
        return _Words(nn.GRU(16, 16, batch_first=True))
    import transformers

    config: Any = {
        "llama": lambda: transformers.LlamaConfig(**_SMALL, intermediate_size=32, use_cache=False),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=_VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=4096, use_cache=False
        ),
        "bert": lambda: transformers.BertConfig(**_SMALL, intermediate_size=32, max_position_embeddings=4096),
    }[name]()
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    return kind.from_config(config).train()


def _make_batch(name: str) -> Any:
    def make(examples: int, tokens: int) -> Any:
        ids = torch.zeros(examples, tokens, dtype=torch.int64)
        return ids if name in ("words", "gru") else {"input_ids": ids, "labels": ids}

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["words", "llama", "gru", "gpt2", "bert"], ["words"]))
def test_the_answer_fits_and_the_next_size_does_not(name: str) -> None:
    model, make_batch = _model(name), _make_batch(name)
    optimizer = torch.optim.SGD(model.parameters())
    step: dict[str, Any] = {"device": "a100-80gb", "optimizer": optimizer, "actions": ("rederive", "recompute")}
    with pytest.raises(InfeasibleBudget) as caught:
        recoup.plan(model, make_batch(1, 32), budget=1, **step)
    budget = caught.value.minimum_bytes + 2**17
    limits = recoup.max_tokens(model, make_batch, budget=budget, multiple_of=32, lengths=[64], limit=4096, **step)
    longest = limits.longest_tokens
    assert 32 < longest < 4096 and longest % 32 == 0
    assert limits.most_tokens == max(length * examples for length, examples in limits.batches)
    for examples, length, more, longer in (
        (1, longest, 1, longest + 32),
        *((n, k, n + 1, k) for k, n in limits.batches),
    ):
        recoup.plan(model, make_batch(examples, length), budget=budget, **step)
        with pytest.raises(InfeasibleBudget):
            recoup.plan(model, make_batch(more, longer), budget=budget, **step)


def test_what_cannot_be_a_length_is_refused() -> None:
    model, make_batch = _model("words"), _make_batch("words")
    for words, options in (
        ("multiple_of must be", {"multiple_of": 0}),
        ("lengths must be", {"lengths": [128, 1.5]}),
        (r"a list.*got 128\. Write \[128", {"lengths": 128}),
        ("names no length", {"lengths": []}),
        ("lengths must be", {"lengths": "128"}),
        ("below the shortest", {"limit": 64}),
        ("bytes.*'60%'", {"budget": "60%"}),
        ("bytes.*'min'", {"budget": "min"}),
    ):
        with pytest.raises(UsageError, match=words):
            recoup.max_tokens(model, make_batch, **{"budget": "1GiB", "device": "a100-80gb", **options})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    target = "hf:llama?" + "&".join(f"{key}={value}" for key, value in {**_SMALL, "intermediate_size": 32}.items())
    options = ["--budget", "20MiB", "--device", "a100-80gb", "--multiple-of", "64", "--limit", "1024", "--quiet"]
    assert run(["fit-length", target, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["longest_tokens"] % 64 == 0 and found["most_tokens"] >= found["longest_tokens"] > 0


_FILE = """
import torch

def target(batch: int = 2, seq: int = 32):
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64), torch.nn.GELU())
    ids = torch.randint(0, 64, (batch, seq))
    loss = lambda logits, labels: torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return dict(model=model, inputs=ids, targets=ids, loss=loss, scaler=torch.amp.GradScaler("cpu"))

def alone(batch: int = 2, seq: int = 32):
    given = target(batch, seq)
    return dict(model=given["model"], batch=given["inputs"], loss=lambda o, _: o.mean(), scaler=given["scaler"])

def fixed(batch: int = 2):
    return target(batch)
"""


@pytest.mark.parametrize("name", ["target", "alone"])
def test_the_command_takes_what_fit_takes_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "own.py").write_text(_FILE)
    options = ["--budget", "2MiB", "--device", "cpu-generic", "--multiple-of", "64", "--limit", "256", "--quiet"]
    assert run(["fit-length", f"{tmp_path / 'own.py'}:{name}", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest_tokens"] == 256
    assert run(["fit-length", f"{tmp_path / 'own.py'}:fixed", *options]) == 2
    assert "fixed() in " in (said := capsys.readouterr().err) and "no parameter 'seq'" in said
