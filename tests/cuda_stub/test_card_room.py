"""What an applied plan has torch reserve: the step runs on the card that is predicted, whatever came before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup._torch import clear_cublas_workspaces
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from tests.cuda_stub.kit import stub
from tests.cuda_stub.models import Attention

assert stub.is_active()
TOTAL = torch.cuda.get_device_properties(0).total_memory


class _Words(nn.Module):
    """Blocks of attention with dropout below a head whose logits are the largest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8_000, 512), nn.Linear(512, 8_000)
        self.blocks = nn.Sequential(*(Attention(512, 8, dropout=0.1) for _ in range(4)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(ids)))


class _Pyramid(nn.Module):
    """Layers at four lengths of a sequence, their results added up at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 128)
        self.down = nn.ModuleList(nn.Linear(128 << i, 256 << i) for i in range(3))
        self.up = nn.ModuleList(nn.Linear(256 << i, 128 << i) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, before = self.stem(x), []
        for down in self.down:
            before.append(x)
            x = F.silu(down(x)).unflatten(1, (-1, 4)).mean(2)
        for up in reversed(self.up):
            x = F.silu(up(x.repeat_interleave(4, dim=1))) + before.pop()
        return x


MADE = {
    "words": (_Words, lambda: torch.zeros(16, 512, dtype=torch.long, device="cuda")),
    "pyramid": (_Pyramid, lambda: torch.zeros(8, 65536, 64, device="cuda")),
}


@contextlib.contextmanager
def _limit(nbytes: int) -> Iterator[None]:
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / TOTAL)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _runs(kind: str, plan: recoup.Plan, limit_bytes: int, before: str) -> bool:
    make, batch = MADE[kind]
    with _limit(limit_bytes):
        try:
            model, x = make().cuda(), batch()
            optimizer = torch.optim.AdamW(model.parameters())
            if before == "let go":
                torch.empty(max(p.nbytes for p in model.parameters()), dtype=torch.uint8, device="cuda")
            if before == "resumed":
                for p in model.parameters():
                    moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
            with recoup.apply(model, plan):
                for _ in range(3):
                    model(x).float().square().mean().backward()
                    assert torch.cuda.max_memory_allocated() <= plan.budget_bytes
                    optimizer.step()
                    optimizer.zero_grad()
                    if before == "emptied":
                        torch.cuda.empty_cache()
        except torch.OutOfMemoryError:
            return False
    return True


@pytest.mark.parametrize("kind", MADE)
def test_a_plan_runs_on_the_predicted_card_and_on_none_much_smaller(kind: str) -> None:
    make, batch = MADE[kind]
    options = {"optimizer": torch.optim.AdamW, "loss": lambda y, _: y.float().square().mean()}
    cost = RooflineCost(get_device("h100-sxm"))
    plan = recoup.plan(make().cuda(), batch(), budget="60%", device="cuda", cost=cost, **options)
    card_bytes, room_bytes = plan.predicted.card_bytes, plan.predicted.room_bytes
    assert card_bytes >= max(plan.predicted.peak_bytes, room_bytes) and card_bytes == plan.predicted.resumed_card_bytes
    assert room_bytes > card_bytes // 2
    for before in ("", "let go", "resumed", "emptied"):
        assert _runs(kind, plan, card_bytes, before), before
    if kind == "pyramid":  # words also run on smaller cards, by luck: where no room is to be had; this one on 7 % less
        assert not _runs(kind, plan, int(card_bytes / 1.1), "")


def test_a_card_without_the_room_or_with_expandable_segments_is_left_alone() -> None:
    make, batch = MADE["pyramid"]
    with _limit(TOTAL):
        model, x = make().cuda(), batch()
        plan = recoup.plan(model, x, budget="60%", device="cuda", cost=RooflineCost(get_device("h100-sxm")))
    with _limit(plan.predicted.room_bytes - (1 << 20)), recoup.apply(model, plan):
        reserved = torch.cuda.memory_reserved()
        with torch.no_grad():
            model(x[:1])
        with contextlib.suppress(torch.OutOfMemoryError):
            model(x)
        assert torch.cuda.max_memory_allocated() < plan.predicted.room_bytes - reserved
    with _limit(TOTAL), recoup.apply(model, plan):
        model.eval()(x[:1])
        assert torch.cuda.memory_reserved() < plan.predicted.room_bytes
        model.train()(x[:1])
        assert torch.cuda.memory_reserved() >= plan.predicted.room_bytes
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        with _limit(TOTAL), recoup.apply(model, plan):
            model(x[:1])
            assert torch.cuda.memory_reserved() < plan.predicted.room_bytes
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
