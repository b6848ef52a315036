"""TRL's trainers, the real package: losses equal to training without a plan, peaks what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import datasets
import trl
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recoup.errors import ConflictError, UsageError
from recoup.integrations.transformers import RecoupCallback, fit_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default", "ignore::recoup.errors.OtherStepWarning"),
]

_WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    # TRL's heads take tiles of 32768 words whatever the vocabulary is: 16 MiB here, where nothing else takes a tenth.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", len(_WORDS))


def _text(num_words: int, generator: torch.Generator) -> str:
    return " ".join(_WORDS[i] for i in torch.randint(2, len(_WORDS), (num_words,), generator=generator))


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    small: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 96}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, vocab_size=len(_WORDS), **ids))


def _trainer(kind: str, folder: Path, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    word_level = Tokenizer(WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<eos>"))
    word_level.pre_tokenizer = Whitespace()
    rows = {
        "SFT": lambda: {"text": _text(63, generator)},
        "DPO": lambda: {"prompt": _text(20, generator), **{k: _text(43, generator) for k in ("chosen", "rejected")}},
        "GRPO": lambda: {"prompt": _text(32, generator)},
    }[kind]
    own: dict[str, Any] = {}
    if kind == "DPO":
        own["ref_model"] = _model()
    if kind == "GRPO":
        options |= {"num_generations": 4, "max_completion_length": 32}
        own["reward_funcs"] = lambda completions, **_: [float(len(set(c.split()))) for c in completions]
    settings: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return getattr(trl, f"{kind}Trainer")(
        model=_model(),
        args=getattr(trl, f"{kind}Config")(output_dir=str(folder), **{**settings, **options}),
        train_dataset=datasets.Dataset.from_list([rows() for _ in range(16)]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="<pad>", eos_token="<eos>"),
        **own,
    )


def _train(trainer: Any) -> tuple[list[Any], int]:
    watching = RecoupCallback()
    trainer.add_callback(watching)
    torch.manual_seed(1)
    trainer.train()
    assert watching.meter.peak_bytes is not None
    log = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return log, watching.meter.peak_bytes


def _completions() -> dict[str, torch.Tensor]:
    """What GRPO's loss gets at most: 4 prompts of 32 tokens with 32 tokens of completion each."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    ids = {name: torch.ones(4, 32, dtype=torch.int64) for name in names}
    ids["completion_mask"][0, -1] = 0  # where nothing is padded a model skips its mask, which takes bytes
    return {**ids, "advantages": torch.ones(4), "num_items_in_batch": torch.tensor(128)}


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_losses_are_the_same_and_the_peak_is_the_plans(kind: str, tmp_path: Path) -> None:
    plain_log, plain_bytes = _train(_trainer(kind, tmp_path))
    trainer = _trainer(kind, tmp_path)
    counted = str(trainer._metrics), trainer._total_train_tokens if kind == "SFT" else None, sorted(vars(trainer))
    found = fit_trainer(trainer, budget="70%", batch=_completions() if kind == "GRPO" else None)
    assert found.evidence.ok
    assert counted == (
        str(trainer._metrics),
        trainer._total_train_tokens if kind == "SFT" else None,
        sorted(vars(trainer)),
    )
    log, peak_bytes = _train(trainer)
    assert log == plain_log and len(log) == 3
    # The callback knows of no reference model and of no batch that is there before the step; GRPO makes its in it.
    elsewhere = {"SFT": 3, "DPO": 6, "GRPO": 0}[kind] * 8 * 4 * 64
    if kind == "DPO":
        elsewhere += sum(p.nbytes for p in trainer.ref_model.parameters())
    predicted_bytes = found.plan.predicted.peak_bytes
    assert abs(peak_bytes + elsewhere - predicted_bytes) <= 0.001 * predicted_bytes  # completions differ in length
    assert peak_bytes < 0.75 * plain_bytes


def test_precision_of_a_model_with_trls_forward_is_planned(tmp_path: Path) -> None:
    trainer = _trainer("SFT", tmp_path, bf16=True, gradient_accumulation_steps=2)
    found = fit_trainer(trainer, budget="80%")
    _, peak_bytes = _train(trainer)
    assert abs(peak_bytes + 3 * 8 * 4 * 64 - found.plan.predicted.peak_bytes) <= 256


def test_what_cannot_be_planned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer("SFT", tmp_path)
    for option in ("gradient_checkpointing", "activation_offloading"):
        with monkeypatch.context() as patched, pytest.raises(ConflictError, match=option):
            patched.setattr(trainer.args, option, True)
            fit_trainer(trainer, budget="70%")
    trainer = _trainer("GRPO", tmp_path)
    before = sorted(vars(trainer))
    with pytest.raises(UsageError, match=r"GRPOTrainer's collator .* Give batch="):
        fit_trainer(trainer, budget="70%")
    assert sorted(vars(trainer)) == before
