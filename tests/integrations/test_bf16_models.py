"""Language models in bf16: what is taken by default leaves every bit as it is, and tiles end within their bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.cli.main import run
from recoup.ir.decision import TileLoss
from tests.thorough import cases

pytest.importorskip("accelerate")
pytest.importorskip("peft")


class _Autocast(nn.Module):
    """A model that runs in bf16 autocast, as `accelerate` has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=256, bos_token_id=0, eos_token_id=0)).train()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=64, pad_token_id=0)).train()


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


def _target(build: Callable[[], nn.Module], precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build()
    ids = _ids(8, 48)
    made = _Autocast(model) if precision == "autocast" else model.bfloat16()
    return {"model": made, "batch": {"input_ids": ids, "labels": ids}}


def gpt2_autocast() -> dict[str, Any]:
    return _target(_gpt2, "autocast")


def gpt2_weights() -> dict[str, Any]:
    return _target(_gpt2, "weights")


def llama_autocast() -> dict[str, Any]:
    return _target(_llama, "autocast")


def llama_weights() -> dict[str, Any]:
    return _target(_llama, "weights")


_TARGETS = [gpt2_autocast, gpt2_weights, llama_autocast, llama_weights]
_TILE = ("tile", "rederive", "recompute")
_ACTIONS = [None, _TILE]


@pytest.mark.slow
@pytest.mark.parametrize("make", cases(_TARGETS, [gpt2_autocast, llama_weights]), ids=lambda f: f.__name__)
def test_a_default_plan_is_bit_equal(make: Callable[[], dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", f"{__file__}:{make.__name__}", "--budget", "60%", "--quiet"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("ok: within the budget, and exact")


@pytest.mark.slow
@pytest.mark.parametrize("make", cases(_TARGETS, [gpt2_weights, llama_autocast]), ids=lambda f: f.__name__)
def test_a_tiled_plan_says_its_bound(make: Callable[[], dict[str, Any]]) -> None:
    fit = recoup.fit(**make(), budget="60%", actions=("tile", "rederive"), timed=False)
    assert any(isinstance(d, TileLoss) for d in fit.plan.decisions)
    assert fit.evidence.ok, fit.evidence
    error = max(fit.evidence.max_gradient_error, fit.evidence.loss_error)
    assert 0 < error <= fit.evidence.error_bound < 0.5
    verdict = str(fit).rstrip().splitlines()[-1]
    assert verdict.startswith("ok: within the budget, and equal within rounding"), verdict
    assert f"bound {fit.evidence.error_bound:.1e}" in verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore:.*use_cpu.*")
@pytest.mark.parametrize("actions", cases(_ACTIONS, [_TILE]), ids=["default", "tile"])
@pytest.mark.parametrize("build", cases([_gpt2, _llama], [_llama]), ids=lambda f: f.__name__)
def test_lora_with_the_trainer_in_bf16(
    tmp_path: Path, build: Callable[[], nn.Module], actions: tuple[str, ...] | None
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from recoup.integrations import transformers as integration

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = LoraConfig(
            r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM", fan_in_fan_out=build is _gpt2
        )
        return get_peft_model(build(), config).train()

    data = [{"input_ids": row, "labels": row} for row in _ids(16, 48)]
    args = TrainingArguments(
        output_dir=str(tmp_path), bf16=True, max_steps=2, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=1, dataloader_pin_memory=False, log_level="error",
    )  # fmt: skip

    def losses(model: nn.Module) -> list[float]:
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    model = adapted()
    fit = integration.fit(model, args, data, budget="60%", timed=False, actions=actions)
    assert fit.evidence.ok, fit.evidence
    expected = losses(adapted())
    if actions is None:
        assert fit.evidence.gradients_equal
        assert losses(model) == expected
    else:
        verdict = str(fit).rstrip().splitlines()[-1]
        assert "exact" in verdict or "equal within rounding" in verdict
        assert losses(model) == pytest.approx(expected, rel=fit.evidence.error_bound)
