"""Log-probabilities and entropies as trainers write them, on logits that are not there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.ir.decision import TileLoss
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Head(nn.Module):
    """A model of one layer; its output is the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).tanh())


def _by_example(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """gather minus logsumexp, an example at a time."""
    chosen = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return (chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])).mean()


def _rows_of_log_probs(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """log-softmax and gather, an example at a time."""
    pairs = zip(logits, index, strict=True)
    rows = [F.log_softmax(row, dim=-1).gather(dim=-1, index=i.unsqueeze(-1)).squeeze(-1) for row, i in pairs]
    return torch.stack(rows).square().mean()


def _entropy_in_chunks(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    found = []
    for chunk in (logits / 0.7).reshape(-1, logits.shape[-1]).split(5, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(found).reshape(logits.shape[:-1]).square().mean()


def _policy_gradient(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A clipped ratio and a KL penalty against constants; the entropy only looked at."""
    logits = logits[:, :-1]
    logps = logits.log_softmax(-1)
    mine = logps.gather(2, index[:, 1:, None]).squeeze(2)
    with torch.no_grad():
        entropy = -(logits.softmax(-1) * logps).sum(-1) + 0 * logits.logsumexp(-1)
    ratio = torch.exp(mine - mine.detach() * 0.9)
    return -(ratio * 0.3).clamp(0, 1).mean() + 0.1 * (mine + 3).square().mean() + 0 * entropy.mean()


def _several_classes(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    best = torch.stack([index, (index + 1) % 40, (index + 7) % 40], -1)
    return -torch.log_softmax(logits, -1, dtype=logits.dtype).gather(-1, best).mean(-1).sum()


_LOSSES: tuple[Loss, ...] = (_by_example, _rows_of_log_probs, _entropy_in_chunks, _policy_gradient, _several_classes)


def _step(model: nn.Module, ids: torch.Tensor, loss: Loss) -> list[torch.Tensor]:
    model.zero_grad()
    found = loss(model(ids), ids)
    found.backward()
    return [found.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("loss", _LOSSES)
def test_no_logits_and_the_same_gradients(loss: Loss) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (3, 11))
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
        model = copy.deepcopy(_Head()).to(dtype)
        wanted = _step(model, ids, loss)
        before = execution_context.thread_log()
        with apply_decisions(model, (TileLoss(path="head", tile_tokens=4),)):
            found = _step(model, ids, loss)
        ran = execution_context.thread_log() - before
        assert ran.num_tiled and not ran.num_logits_made
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.dtype == theirs.dtype
            assert (mine.double() - theirs.double()).norm() <= bound * theirs.double().norm().clamp_min(1.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda logits, ids: logits.log_softmax(1).mean(),
        lambda logits, ids: logits.log_softmax(-1).sum(0).square().sum(),
        lambda logits, ids: logits.log_softmax(-1).cumsum(-1).mean(),
        lambda logits, ids: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), ids.flatten()),
        lambda logits, ids: logits.gather(1, (ids[..., None] % 11).expand(-1, -1, 40)).mean(),
        lambda logits, ids: (logits.softmax(-1) * logits.roll(1, 0)).sum(-1).mean(),
        lambda logits, ids: (logits.log_softmax(-1) * 2).logsumexp(-1).mean(),
        lambda logits, ids: (-logits.log_softmax(-1)).exp()[0, 2:5].logsumexp(-1, keepdim=True).mean(),
    ],
)
def test_anything_else_gives_the_plain_numbers(use: Any) -> None:
    torch.manual_seed(0)
    model, ids = _Head().double(), torch.randint(0, 40, (3, 11))
    wanted = _step(model, ids, use)
    with apply_decisions(model, (TileLoss(path="head", tile_tokens=4),)):
        found = _step(model, ids, use)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_planner_finds_the_head_of_a_policy_gradient() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(4000, 32), nn.Linear(32, 4000))
        ids = torch.zeros(4, 512, dtype=torch.int64)
    logits_bytes = 4 * 512 * 4000 * 4
    for loss in (_by_example,):
        step: dict[str, Any] = {"loss": lambda output, batch, loss=loss: loss(output, batch), "device": "a100-80gb"}
        plan = recoup.plan(model, ids, budget="min", actions=("rederive", "tile"), **step)
        assert any(isinstance(d, TileLoss) for d in plan.decisions)
        assert plan.predicted.peak_bytes < recoup.profile(model, ids, **step).peak_bytes - 1.5 * logits_bytes
