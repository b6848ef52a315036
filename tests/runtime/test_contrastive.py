"""A loss over all pairs with the towers in chunks: the gradients of the undivided step, at a chunk's peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import UsageError
from recoup.evidence.memory import measure_peak


class _Clip(nn.Module):
    """Two towers and a learned temperature; a counter that each call moves."""

    def __init__(self, dropout: float, width: int = 24) -> None:
        super().__init__()

        def tower(size: int) -> nn.Module:
            hidden = [nn.Linear(size, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(4 * width)]
            return nn.Sequential(*hidden, nn.Linear(4 * width, width))

        self.image, self.text = tower(10), tower(6)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def encode_text(self, *, tokens: torch.Tensor, offset: float) -> torch.Tensor:
        self.num_calls += 1
        return F.normalize(self.text(tokens + offset), dim=-1)

    def loss(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logits = self.scale.exp() * F.normalize(a, dim=-1) @ b.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def _step(model: _Clip, images: torch.Tensor, tokens: torch.Tensor, chunk: int | None, *, keeps: bool) -> Any:
    """A step in chunks that keep everything, or of `recoup.contrastive`; None: in one piece."""
    torch.manual_seed(3)
    model.zero_grad()
    model.num_calls.zero_()
    chunk = chunk or len(images)
    text = {"tokens": tokens, "offset": 0.5}
    if keeps:
        a = torch.cat([model.image(part) for part in images.split(chunk)])
        loss = model.loss(a, torch.cat([model.encode_text(**{**text, "tokens": p}) for p in tokens.split(chunk)]))
    else:
        loss = recoup.contrastive(model.loss, (model.image, images), (model.encode_text, text), chunk_size=chunk)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], torch.rand(3), model.num_calls.clone()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_are_those_of_the_chunks_with_everything_kept(dropout: float) -> None:
    torch.manual_seed(0)
    model = _Clip(dropout).double()
    images, tokens = torch.randn(22, 10).double(), torch.randn(22, 6).double()
    for chunk in (1, 5, 22, 40):
        loss, gradients, after, num_calls = _step(model, images, tokens, chunk, keeps=False)
        wanted = _step(model, images, tokens, chunk, keeps=True)
        assert torch.equal(loss, wanted[0]) and all(map(torch.equal, gradients, wanted[1]))
        assert torch.equal(after, wanted[2])  # the random stream goes on where the plain chunks leave it
        assert num_calls == wanted[3] == -(-22 // chunk)  # a chunk's second forward moves no buffer
        if not dropout:
            whole = _step(model, images, tokens, None, keeps=True)
            for mine, theirs in zip([loss, *gradients], [whole[0], *whole[1]], strict=True):
                assert (mine - theirs).norm() <= 1e-12 * theirs.norm().clamp_min(1.0)


def test_the_peak_is_a_chunks() -> None:
    torch.manual_seed(0)
    model = _Clip(0.1, width=32)
    images, tokens = torch.randn(2048, 10), torch.randn(2048, 6)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(1).square().mean()  # without the table of all pairs, which no chunk changes

    def plain() -> None:
        loss(model.image(images), model.encode_text(tokens=tokens, offset=0.0)).backward()

    def chunked() -> None:
        towers: Any = ((model.image, images), (lambda t: model.encode_text(tokens=t, offset=0.0), tokens))
        recoup.contrastive(loss, *towers, chunk_size=64).backward()

    plain()  # gradients are there
    peaks = [measure_peak(step, device=torch.device("cpu"), held_bytes=0) for step in (plain, chunked)]
    assert peaks[1] < 0.45 * peaks[0]


def test_one_encoder_for_both_and_any_number_of_towers() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    batches = [torch.randn(9, 6).double() for _ in range(3)]

    def triplet(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(a, b, c) + (a @ b.T).logsumexp(1).mean()

    wanted = torch.autograd.grad(triplet(*map(encoder, batches)), list(encoder.parameters()))
    loss = recoup.contrastive(triplet, *((encoder, batch) for batch in batches), chunk_size=4)
    for mine, theirs in zip(torch.autograd.grad(loss, list(encoder.parameters())), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_transformers_clip() -> None:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": 50, "eos_token_id": 49, "attention_dropout": 0.2},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    model = CLIPModel(config).train()
    tokens, images = torch.randint(0, 49, (10, 7)), torch.randn(10, 3, 16, 16)

    def embed(make: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(**inputs: torch.Tensor) -> torch.Tensor:
            made = make(**inputs)
            return F.normalize(made if isinstance(made, torch.Tensor) else made.pooler_output, dim=-1)

        return run

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.logit_scale.exp() * a @ b.T, torch.arange(len(a)))

    text, image = embed(model.get_text_features), embed(model.get_image_features)
    torch.manual_seed(1)
    a = torch.cat([text(input_ids=part) for part in tokens.split(4)])
    plain = loss(a, torch.cat([image(pixel_values=part) for part in images.split(4)]))
    wanted = torch.autograd.grad(plain, list(model.parameters()))
    torch.manual_seed(1)
    towers: Any = ((text, {"input_ids": tokens}), (image, {"pixel_values": images}))
    found = recoup.contrastive(loss, *towers, chunk_size=4)
    assert torch.equal(found, plain)
    assert all(map(torch.equal, torch.autograd.grad(found, list(model.parameters())), wanted))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_sentence_transformers(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(62))]
    word_level = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    word_level.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(**small, **dropout, vocab_size=len(words))).save_pretrained(tmp_path)
    transformer = Transformer(str(tmp_path))
    model = sentence_transformers.SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu").train()
    pairs = [[" ".join(f"w{i}" for i in row) for row in torch.randint(0, 62, (10, 7)).tolist()] for _ in range(2)]
    features = [model.preprocess(texts) for texts in pairs]
    ranking = MultipleNegativesRankingLoss(model)
    parameters = [p for name, p in model.named_parameters() if "pooler" not in name]

    def embed(inputs: dict[str, Any]) -> torch.Tensor:
        return model(dict(inputs))["sentence_embedding"]

    def loss(*embeddings: torch.Tensor) -> torch.Tensor:
        return ranking.compute_loss_from_embeddings(list(embeddings), None)

    plain = ranking([dict(f) for f in features], None)
    wanted = torch.autograd.grad(plain, parameters)
    towers: Any = [
        (lambda **f: embed(f), {k: v for k, v in f.items() if isinstance(v, torch.Tensor)}) for f in features
    ]
    found = recoup.contrastive(loss, *towers, chunk_size=4)
    model.zero_grad()
    cached = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)([dict(f) for f in features], None)
    cached.backward()  # sentence-transformers' own GradCache
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(cached, plain)
    for mine, theirs, parameter in zip(torch.autograd.grad(found, parameters), wanted, parameters, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm().clamp_min(1e-3)
        assert parameter.grad is not None and (mine - parameter.grad).norm() <= 1e-5 * theirs.norm().clamp_min(1e-3)


def test_what_chunks_would_change_is_refused() -> None:
    x = torch.randn(4, 3)
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for words, call in (
        ("`1` of tower 0 .*BatchNorm1d", lambda: recoup.contrastive(torch.sum, (normed, x), chunk_size=2)),
        ("`1` of tower 0", lambda: recoup.contrastive(torch.sum, (lambda t: normed(t), x), chunk_size=2)),
        ("chunk_size", lambda: recoup.contrastive(torch.sum, (normed.eval(), x), chunk_size=0)),
        ("pair", lambda: recoup.contrastive(torch.sum, normed, chunk_size=2)),  # type: ignore[arg-type]
        ("row an example", lambda: recoup.contrastive(torch.sum, (torch.mean, x), chunk_size=2)),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    assert recoup.contrastive(torch.sum, (normed, x), chunk_size=3).shape == ()  # now in eval mode
