"""Losses of reinforcement learning and distillation over tiles, against their definitions with all logits there."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import UsageError

_NUM_CASES = int(os.environ.get("RECOUP_CASES", "8"))  # 300 once, before a release


def _reduce(rows: torch.Tensor, mask: torch.Tensor | None, reduction: str) -> torch.Tensor:
    rows = rows if mask is None else rows.masked_fill(~mask, 0)
    if reduction == "none":
        return rows
    num = rows.numel() if mask is None else mask.sum()
    return rows.sum() / num if reduction == "mean" else rows.sum()


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class _Case:
    """A random problem: shapes, options and the plain logits."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        pick = self.random.choice
        self.shape = pick([(7,), (2, 5), (3, 1), (2, 2, 3)])
        self.classes = self.random.randint(4, 12)
        self.width = self.random.randint(1, 6)
        self.hidden = self.normal(*self.shape, self.width)
        self.weight = self.normal(self.classes, self.width)
        self.bias = self.normal(self.classes) if pick([True, False]) else None
        self.scale, self.cap, self.temperature = pick([None, 0.5, -2.0]), pick([None, 2.0]), pick([None, 0.7, 3.0])
        self.mask = pick([None, torch.rand(self.shape, generator=self.generator) < 0.7])
        self.reduction = pick(["none", "sum", "mean"])
        needed = pick([(True, True), (True, False), (False, True)])
        self.hidden.requires_grad_(needed[0])
        self.weight.requires_grad_(needed[1])
        if self.bias is not None:
            self.bias.requires_grad_(needed[1])
        self.head = {
            "bias": self.bias,
            "logit_scale": self.scale,
            "softcap": self.cap,
            "temperature": self.temperature,
            **pick([{"tile_tokens": self.random.randint(1, 9)}, {"num_tiles": self.random.randint(1, 4)}, {}]),
        }

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def labels(self, *more: int) -> torch.Tensor:
        found = torch.randint(0, self.classes, (*self.shape, *more), generator=self.generator)
        ignored = torch.rand(found.shape, generator=self.generator) < 0.3
        return found.masked_fill(ignored, -100)

    def logits(self, output: torch.Tensor, *, scaled: bool = True) -> torch.Tensor:
        if scaled and self.scale is not None:
            output = output * self.scale
        if scaled and self.cap is not None:
            output = self.cap * torch.tanh(output / self.cap)
        return output if self.temperature is None else output / self.temperature

    def log_probs(self) -> torch.Tensor:
        return self.logits(F.linear(self.hidden, self.weight, self.bias)).log_softmax(-1)


Pair = tuple[Any, Any]


def _log_probs(case: _Case) -> Pair:
    labels = case.labels(*case.random.choice([(), (3,)]))
    shift = case.random.choice([True, False])
    found = recoup.tiled_log_probs(case.hidden, case.weight, labels, shift=shift, **case.head)
    if shift:
        last = torch.full_like(labels.select(len(case.shape) - 1, 0), -100).unsqueeze(len(case.shape) - 1)
        labels = torch.cat([labels.narrow(len(case.shape) - 1, 1, case.shape[-1] - 1), last], len(case.shape) - 1)
    index = labels if labels.dim() > len(case.shape) else labels.unsqueeze(-1)
    rows = case.log_probs().gather(-1, index.clamp_min(0)).masked_fill(index < 0, 0)
    return found, rows.view(labels.shape)


def _both(case: _Case) -> Pair:
    labels = case.labels()
    found = recoup.tiled_log_probs_and_entropy(case.hidden, case.weight, labels, **case.head)
    logp = case.log_probs()
    rows = logp.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    wanted = [t.masked_fill(labels < 0, 0) for t in (rows, -(logp.exp() * logp).sum(-1))]
    return torch.stack(found), torch.stack(wanted)


def _entropy(case: _Case) -> Pair:
    logp = case.log_probs()
    return recoup.tiled_entropy(case.hidden, case.weight, **case.head), -(logp.exp() * logp).sum(-1)


def _z_loss(case: _Case) -> Pair:
    found = recoup.tiled_logsumexp(case.hidden, case.weight, **case.head)
    logits = case.logits(F.linear(case.hidden, case.weight, case.bias))
    return 1e-2 * found.square(), 1e-2 * logits.logsumexp(-1).square()


def _divergence(case: _Case) -> Pair:
    direction = case.random.choice(["forward", "reverse"])
    options: dict[str, Any] = {"direction": direction, "mask": case.mask, "reduction": case.reduction, **case.head}
    if case.random.choice([True, False]):
        reference = case.normal(*case.shape, case.classes)
        log_q = case.logits(reference, scaled=False).log_softmax(-1)
    else:
        reference, matrix, bias = case.normal(*case.shape, 3), case.normal(case.classes, 3), case.normal(case.classes)
        options |= {"reference_weight": matrix, "reference_bias": bias}
        log_q = case.logits(F.linear(reference, matrix, bias)).log_softmax(-1)
    found = recoup.tiled_kl(case.hidden, case.weight, reference, **options)
    log_p = case.log_probs()
    rows = _kl(log_q, log_p) if direction == "forward" else _kl(log_p, log_q)
    return found, _reduce(rows, case.mask, case.reduction)


def _soft(case: _Case) -> Pair:
    targets = case.normal(*case.shape, case.classes).softmax(-1)
    smoothing = case.random.choice([0.0, 0.1])
    targets = targets * (1 - smoothing) + smoothing / case.classes
    options: dict[str, Any] = {"mask": case.mask, "reduction": case.reduction, **case.head}
    found = recoup.tiled_soft_cross_entropy(case.hidden, case.weight, targets, **options)
    return found, _reduce(-(targets * case.log_probs()).sum(-1), case.mask, case.reduction)


def _distilled(case: _Case) -> Pair:
    teacher = case.normal(*case.shape, case.classes).log_softmax(-1)
    best, indices = teacher.topk(3, -1)
    tail = case.random.choice([True, False])
    options: dict[str, Any] = {"tail": tail, "mask": case.mask, "reduction": case.reduction, **case.head}
    found = recoup.tiled_topk_distillation(case.hidden, case.weight, indices, best, **options)
    mine = case.log_probs().gather(-1, indices)
    if tail:
        others = torch.ones_like(teacher, dtype=torch.bool).scatter(-1, indices, False)
        rest = [t.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True) for t in (teacher, case.log_probs())]
        rows = _kl(torch.cat([best, rest[0]], -1), torch.cat([mine, rest[1]], -1))
    else:
        rows = _kl(best.log_softmax(-1), mine.log_softmax(-1))
    return found, _reduce(rows, case.mask, case.reduction)


def _cross_entropy(case: _Case) -> Pair:
    labels = case.labels()
    smoothing, z = case.random.choice([0.0, 0.1]), case.random.choice([0.0, 1e-2])
    options: dict[str, Any] = {"label_smoothing": smoothing, "z_loss": z, "reduction": "sum", **case.head}
    found = recoup.tiled_cross_entropy(case.hidden, case.weight, labels, **options)
    logits = case.logits(F.linear(case.hidden, case.weight, case.bias)).flatten(0, -2)
    wanted = F.cross_entropy(logits, labels.flatten(), label_smoothing=smoothing, reduction="sum")
    return found, wanted + (z * logits.logsumexp(1).square() * (labels.flatten() >= 0)).sum()


_LOSSES: tuple[Callable[[_Case], Pair], ...] = (
    *(_log_probs, _both, _entropy, _z_loss, _divergence, _soft, _distilled, _cross_entropy),
)


def _apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1.0))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_values_and_gradients_are_the_untiled_ones(dtype: torch.dtype, bound: float) -> None:
    for number, loss in enumerate(_LOSSES):
        for seed in range(_NUM_CASES):
            case = _Case(1000 * number + seed, dtype)
            found, wanted = loss(case)
            assert found.shape == wanted.shape and found.dtype == dtype
            name = f"{loss.__name__} {seed}"
            if case.mask is not None and case.reduction == "mean" and not case.mask.any():
                continue  # 0 / 0 in both
            assert _apart(found, wanted) <= bound, name
            leaves = [t for t in (case.hidden, case.weight, case.bias) if t is not None and t.requires_grad]
            above = case.normal(*wanted.shape)
            gradients = torch.autograd.grad(found, leaves, above)
            for mine, theirs in zip(gradients, torch.autograd.grad(wanted, leaves, above), strict=True):
                assert _apart(mine, theirs) <= bound, name


class _Training(nn.Module):
    """Hidden states to log-probabilities, as policy gradients want them."""

    def __init__(self, tiles: bool) -> None:
        super().__init__()
        self.tiles = tiles
        self.body = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 128 * 1024, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if self.tiles:
            logps, spread = recoup.tiled_log_probs_and_entropy(hidden, self.head.weight, labels, tile_tokens=1024)
            return -(logps + spread).mean()
        logp = self.head(hidden).log_softmax(-1)
        return -(logp.gather(-1, labels.unsqueeze(-1)) - (logp.exp() * logp).sum(-1)).mean()


@pytest.mark.slow
def test_32k_tokens_of_128k_words_without_their_logits() -> None:
    with torch.device("meta"):
        x, labels = torch.empty(32 * 1024, 8), torch.zeros(32 * 1024, dtype=torch.int64)
        models = [_Training(tiles=True), _Training(tiles=False)]
    logits_bytes = 32 * 1024 * 128 * 1024 * 4
    tiled, plain = (recoup.profile(m, (x, labels), device="a100-80gb") for m in models)
    assert plain.peak_bytes > 2 * logits_bytes
    assert tiled.peak_bytes < logits_bytes / 4


def test_low_precision_and_autocast() -> None:
    case = _Case(3, torch.float32)
    hidden, weight = case.normal(40, 16), case.normal(50, 16)
    labels = torch.randint(0, 50, (40,), generator=case.generator)
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        logps = recoup.tiled_log_probs(*leaves, labels, tile_tokens=7)
        assert logps.dtype == torch.float32
        exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
        wanted = F.linear(*exact).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        assert _apart(logps, wanted) <= bound
        for mine, theirs in zip(
            torch.autograd.grad(logps.sum(), leaves), torch.autograd.grad(wanted.sum(), exact), strict=True
        ):
            assert mine.dtype == dtype and _apart(mine, theirs) <= bound
    with torch.autocast("cpu", torch.bfloat16):
        logps = recoup.tiled_log_probs(hidden.requires_grad_(), weight, labels, tile_tokens=7)
    logps.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32


def test_a_class_without_probability_adds_nothing() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4)
    bias = torch.tensor([0.0, 0, 0, -torch.inf, 0, 0])
    found = recoup.tiled_entropy(hidden, weight, bias=bias, tile_tokens=2)
    plain = F.linear(hidden, weight[[0, 1, 2, 4, 5]]).log_softmax(-1)
    torch.testing.assert_close(found, -(plain.exp() * plain).sum(-1))
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_what_cannot_be_meant_is_refused() -> None:
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(6, 4)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    every: list[tuple[str, Callable[[], Any]]] = [
        ("labels .2, 2.", lambda: recoup.tiled_log_probs(hidden, weight, labels[:, :2])),
        ("class indices", lambda: recoup.tiled_log_probs(hidden, weight, labels.float())),
        ("temperature must be positive", lambda: recoup.tiled_entropy(hidden, weight, temperature=0.0)),
        ("detach it", lambda: recoup.tiled_kl(hidden, weight, hidden, reference_weight=weight)),
        ("reverse or forward", lambda: recoup.tiled_kl(hidden, weight, hidden, direction="both")),
        ("must be logits .2, 3, 6.", lambda: recoup.tiled_kl(hidden, weight, hidden.detach())),
        ("mask", lambda: recoup.tiled_soft_cross_entropy(hidden, weight, torch.ones(2, 3, 6), mask=labels)),
        ("no tail", lambda: recoup.tiled_topk_distillation(
            hidden, weight, torch.arange(6).expand(2, 3, 6), torch.zeros(2, 3, 6))),
    ]  # fmt: skip
    for words, call in every:
        with pytest.raises(UsageError, match=words):
            call()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(recoup.tiled_entropy(hidden, weight).sum(), hidden, create_graph=True)
