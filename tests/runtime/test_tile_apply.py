"""The action `tile` on models: found by what they do to their logits, undone, logits there for who asks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import recoup
from recoup.errors import PlanMismatch, UsageError
from recoup.ir.decision import Decision, TileLoss
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from recoup.runtime.tile.loss.lazy_logits import LazyLogits

V = 300
BOUND = 1e-6  # transformers takes the loss in float32 whatever the model is in
SMALL = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def small(kind: str) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), "lm_head"
    if kind == "gpt2":
        config = hf.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, **IDS)
        return hf.GPT2LMHeadModel(config), "lm_head"
    if kind == "gemma2":  # soft-capped logits
        more = {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 5.0}
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, **more)), "lm_head"
    if kind == "cohere":  # scaled logits
        return hf.CohereForCausalLM(hf.CohereConfig(**SMALL, **IDS, logit_scale=0.3)), "lm_head"
    if kind == "granite":  # divided logits
        return hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL, logits_scaling=3.0)), "lm_head"
    if kind == "bert":  # a bias of its own, tied
        return hf.BertForMaskedLM(hf.BertConfig(**SMALL)), "cls.predictions.decoder"
    if kind == "roberta":
        return hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL)), "lm_head.decoder"
    if kind == "t5":
        config = hf.T5Config(vocab_size=V, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
        config.decoder_start_token_id = 0
        return hf.T5ForConditionalGeneration(config), "lm_head"
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.BartConfig(vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, **sizes)
    return hf.BartForConditionalGeneration(config), "lm_head"  # logits with a buffer added


KINDS = ("llama", "gpt2", "gemma2", "cohere", "granite", "bert", "roberta", "t5", "bart")


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, V, (2, 11), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), gradients, output


def tile(path: str, tokens: int = 6) -> list[Decision]:
    return [TileLoss(path=path, tile_tokens=tokens)]


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() == wanted.keys()
    floor = 1e-3 * sum(g.double().square().sum() for g in wanted.values()) ** 0.5
    for name, gradient in wanted.items():
        error = (found[name].double() - gradient.double()).norm()
        assert error <= bound * max(gradient.double().norm(), floor), name


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_losses_run_over_tiles(kind: str) -> None:
    model, path = small(kind)
    model.double().train()
    loss, gradients, plain_output = step(model, batch_of())
    before = execution_context.tile_counters()
    with apply_decisions(model, tile(path)):
        tiled_loss, tiled, output = step(model, batch_of())
        after = execution_context.tile_counters()
        assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
        torch.testing.assert_close(tiled_loss, loss, rtol=BOUND, atol=0)
        assert_same(tiled, gradients, BOUND)
        assert isinstance(output.logits, LazyLogits)
        assert output.logits.shape == plain_output.logits.shape
        assert torch.equal(output.logits.argmax(-1), plain_output.logits.argmax(-1))  # made now, as plain makes them
        torch.testing.assert_close(output.logits.detach(), plain_output.logits.detach(), rtol=0, atol=0)
    assert torch.equal(step(model, batch_of())[0], loss)
    assert "forward" not in model.get_submodule(path).__dict__


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_float32_within_the_bound(kind: str) -> None:
    model, path = small(kind)
    model.train()
    loss, gradients, _ = step(model, batch_of())
    with apply_decisions(model, tile(path)):
        tiled_loss, tiled, _ = step(model, batch_of())
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=0)
    assert_same(tiled, gradients, 1e-6)


def test_trainers_count_of_items_and_gradient_accumulation() -> None:
    model, path = small("llama")
    model.double()
    count = torch.tensor(37)
    _, wanted, _ = step(model, {**batch_of(), "num_items_in_batch": count})
    with apply_decisions(model, tile(path)):
        _, found, _ = step(model, {**batch_of(), "num_items_in_batch": count})
        assert_same(found, wanted, BOUND)
        for seed in (1, 2):
            (model(**batch_of(seed)).loss / 2).backward()
    accumulated = {n: p.grad.clone() for n, p in model.named_parameters()}
    step(model, {**batch_of(), "num_items_in_batch": count})
    for seed in (1, 2):
        (model(**batch_of(seed)).loss / 2).backward()
    assert_same(accumulated, {n: p.grad for n, p in model.named_parameters()}, BOUND)


def test_two_losses_of_one_head() -> None:
    """The model's loss and one of the caller's own, which makes the logits: both gradients arrive."""
    model, path = small("llama")
    model.double()

    def both() -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(**batch_of())
        (output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    wanted = both()
    with apply_decisions(model, tile(path)):
        assert_same(both(), wanted, BOUND)


def test_own_loss_of_a_plain_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(V, 8)
            self.head = nn.Linear(8, V)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids).tanh())

    torch.manual_seed(0)
    model, ids = Model().double(), batch_of()["input_ids"]
    for loss in (
        lambda out: F.cross_entropy(out[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1), label_smoothing=0.1),
        lambda out: nn.CrossEntropyLoss(reduction="sum")(out.flatten(0, 1), ids.flatten()),
        lambda out: F.cross_entropy(out[..., :-1, :].contiguous().view(-1, V), ids[..., 1:].reshape(-1)),
        lambda out: F.cross_entropy(out[:, 3], ids[:, 3]),
        lambda out: F.cross_entropy(out.view(-1, V), ids.view(-1), reduction="none").mean(),
    ):
        wanted = torch.autograd.grad(loss(model(ids)), list(model.parameters()))
        before = execution_context.tile_counters()
        with apply_decisions(model, tile("head")):
            found = torch.autograd.grad(loss(model(ids)), list(model.parameters()))
        after = execution_context.tile_counters()
        assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, ids: F.cross_entropy(out.transpose(1, 2), ids),
        lambda out, ids: F.cross_entropy(out.view(-1, V), ids.view(-1), weight=torch.ones(V, dtype=out.dtype)),
        lambda out, ids: F.nll_loss(out.log_softmax(-1).view(-1, V), ids.view(-1)),
        lambda out, ids: out.mul_(2.0).sum(),
        lambda out, ids: (out[ids > 100] ** 2).sum(),
        lambda out, ids: torch.cat([out, out]).mean(),
    ],
)
def test_what_tiles_do_not_cover_runs_as_plain(loss: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)).double()
    ids = batch_of()["input_ids"]
    wanted = torch.autograd.grad(loss(model(ids), ids), list(model.parameters()))
    with apply_decisions(model, tile("1")):
        found = torch.autograd.grad(loss(model(ids), ids), list(model.parameters()))
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_logits_changed_in_place_before_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)).double()
    ids = batch_of()["input_ids"]

    def loss() -> torch.Tensor:
        logits = model(ids)
        flat = logits.view(-1, V)  # a view: it sees the change
        logits[:, 0] = 0.0
        return F.cross_entropy(flat, ids.view(-1))

    wanted = loss()
    with apply_decisions(model, tile("1")):
        assert torch.equal(loss(), wanted)


def test_logits_read_after_an_optimizer_step_are_refused() -> None:
    model, path = small("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply_decisions(model, tile(path)):
        output = model(**batch_of())
        output.loss.backward()
        optimizer.step()
        with pytest.raises(UsageError, match="changed in place"):
            output.logits.mean()


def test_copies_and_pickles_are_tiled_too() -> None:
    model, path = small("llama")
    model.double()
    loss, gradients, _ = step(model, batch_of())
    with apply_decisions(model, tile(path)):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            before = execution_context.tile_counters()[0]
            _, found, _ = step(other, batch_of())
            assert execution_context.tile_counters()[0] == before + 1
            assert_same(found, gradients, BOUND)
    assert torch.equal(step(model, batch_of())[0], loss)


def test_frozen_head_gets_no_gradient() -> None:
    model, path = small("llama")
    model.double().get_submodule(path).weight.requires_grad_(False)
    _, wanted, _ = step(model, batch_of())
    with apply_decisions(model, tile(path)):
        _, found, _ = step(model, batch_of())
    assert "lm_head.weight" not in found
    assert_same(found, wanted, BOUND)


def test_autocast_and_bfloat16() -> None:
    model, path = small("llama")
    with torch.autocast("cpu", torch.bfloat16):
        loss, wanted, _ = step(model, batch_of())
        with apply_decisions(model, tile(path)):
            tiled, found, _ = step(model, batch_of())
    torch.testing.assert_close(tiled, loss, rtol=1e-6, atol=0)
    assert_same(found, wanted, 2e-2)
    model.bfloat16()
    loss, wanted, _ = step(model, batch_of())
    with apply_decisions(model, tile(path)):
        tiled, found, _ = step(model, batch_of())
    torch.testing.assert_close(tiled, loss, rtol=1e-6, atol=0)
    assert_same(found, wanted, 2e-2)


def test_evaluation_runs_the_head_itself() -> None:
    model, path = small("llama")
    with apply_decisions(model, tile(path)), torch.no_grad():
        assert type(model(**batch_of()).logits) is torch.Tensor


def test_bad_decisions_change_nothing() -> None:
    model, _ = small("llama")
    for decisions, error in (
        (tile("model.layers.0.mlp.act_fn"), UsageError),
        (tile("head"), PlanMismatch),
    ):
        with pytest.raises(error):
            apply_decisions(model, decisions)
        assert not any("forward" in m.__dict__ for m in model.modules())


def test_plan_with_tile_goes_to_disk_and_back(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Tanh(), nn.Linear(16, 2000))
    ids = torch.randint(0, 2000, (4, 64), generator=torch.Generator().manual_seed(0))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output.view(-1, 2000), batch["input"].view(-1))

    plan = recoup.plan(model, {"input": ids}, budget="40%", loss=loss)
    assert [d.action for d in plan.decisions if d.path == "2"] == ["tile-loss"]
    plan.save(tmp_path / "plan.json")
    again = recoup.Plan.load(tmp_path / "plan.json")
    assert again == plan
    evidence = recoup.verify(model, again, {"input": ids}, loss=loss, timed=False)
    assert evidence.ok
    assert evidence.exactness == "rounding"
    assert evidence.peak_bytes == plan.predicted.peak_bytes
    assert "tile 2 and its loss" in str(plan)
    assert "tile alone peaks at" in str(plan)


def test_tile_can_be_left_out() -> None:
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 2000))
    ids = torch.randint(0, 2000, (4, 64), generator=torch.Generator().manual_seed(0))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output.view(-1, 2000), batch["input"].view(-1))

    with pytest.raises(recoup.InfeasibleBudget):
        recoup.plan(model, {"input": ids}, budget="40%", loss=loss, actions=("rederive", "recompute"))
