"""Steps that wait for the device no more often than the plain step: what `test_steps` leaves out."""

from __future__ import annotations

import collections
import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.ir.decision import Decision, Recompute, TileLoss, TileModule
from recoup.recurrent import checkpoint_timesteps, scan, unroll
from recoup.runtime.apply import apply_decisions
from recoup.runtime.tile.module import tiled
from tests.cuda_stub.kit import stub
from tests.cuda_stub.models import perceptron, transformer

Step = Callable[[], object]
# The plain step, the step of ours, and what is around the latter.
Case = tuple[Step, Step, Callable[[], AbstractContextManager[object]]]
WIDTH, CLASSES = 32, 64


def _language_model() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = nn.Sequential(body, nn.Linear(WIDTH, CLASSES)).cuda()
    return model, torch.zeros(4, 16, WIDTH, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")


def _under(model: nn.Module, step: Step, *decisions: Decision) -> Case:
    return step, step, lambda: apply_decisions(model, decisions)


def _tiled_loss(name: str) -> Case:
    hidden = torch.zeros(64, WIDTH, device="cuda", requires_grad=True)
    weight = torch.zeros(CLASSES, WIDTH, device="cuda", requires_grad=True)
    target = torch.zeros(64, dtype=torch.long, device="cuda")
    mask = torch.ones(64, dtype=torch.bool, device="cuda")
    probs = torch.full((64, CLASSES), 1 / CLASSES, device="cuda")
    top = torch.zeros(64, 4, dtype=torch.long, device="cuda"), torch.zeros(64, 4, device="cuda")
    reduced: dict[str, Any] = {"num_tiles": 4, "mask": mask, "reduction": "mean"}
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "cross_entropy": lambda: recoup.tiled_cross_entropy(hidden, weight, target, num_tiles=4),
        "log_probs": lambda: recoup.tiled_log_probs(hidden, weight, target, num_tiles=4).sum(),
        "entropy": lambda: recoup.tiled_entropy(hidden, weight, num_tiles=4).sum(),
        "logsumexp": lambda: recoup.tiled_logsumexp(hidden, weight, num_tiles=4).sum(),
        "kl": lambda: recoup.tiled_kl(hidden, weight, hidden.detach(), reference_weight=weight.detach(), **reduced),
        "soft": lambda: recoup.tiled_soft_cross_entropy(hidden, weight, probs, **reduced),
        "topk": lambda: recoup.tiled_topk_distillation(hidden, weight, *top, **reduced),
    }
    return lambda: None, lambda: losses[name]().backward(), nullcontext


def _tiles() -> Case:
    model, x, target = _language_model()
    return _under(
        model,
        lambda: F.cross_entropy(model(x).flatten(0, 1), target).backward(),
        TileModule(path="0", tile_tokens=8),
        TileLoss(path="1", tile_tokens=16),
    )


def _by_tensor() -> Case:
    model, x = transformer(dropout=0.1), torch.zeros(64, 64, 128, device="cuda")

    def loss(out: torch.Tensor, _: object) -> torch.Tensor:
        return out.mean()

    cost = RooflineCost(get_device("h100-sxm"))
    plan = recoup.plan(model, x, budget="70%", loss=loss, cost=cost, actions=("rebuild",), device="cuda")
    assert plan.decisions

    def step() -> None:
        model(x).mean().backward()
        model.zero_grad()

    return step, step, lambda: recoup.apply(model, plan)


def _random_regions() -> Case:
    model, x = transformer(dropout=0.1), torch.zeros(2, 64, 128, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        out.float().mean().backward()

    return _under(model, step, *(Recompute(path=str(i)) for i in range(3)))


def _loop(kind: str) -> Case:
    cell, xs = nn.GRUCell(16, WIDTH).cuda(), torch.zeros(24, 4, 16, device="cuda")
    start = torch.zeros(4, WIDTH, device="cuda")

    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = F.dropout(cell(x, state), 0.1)
        return state, state

    def plain() -> None:
        state, ys = start, []
        for x in xs:
            state, y = step(state, x)
            ys.append(y)
        torch.stack(ys).mean().backward()

    options = {"chunk": {"chunk": 4}, "slots": {"slots": 3}, "budget": {"budget": "30%"}, "free": {}}[kind]
    return plain, lambda: scan(step, xs, start, **options)[1].mean().backward(), nullcontext


class _Neuron(nn.Module):
    """State in an attribute and in a buffer that changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.state = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.norm(self.inner(x)) + (0 if self.state is None else 0.9 * self.state)
        return torch.sigmoid(self.state)


def _unrolled() -> Case:
    model, xs = _Neuron().cuda(), torch.zeros(24, 4, WIDTH, device="cuda")

    def plain() -> None:
        model.state = None
        torch.stack([model(x) for x in xs]).mean().backward()

    def ours() -> None:
        model.state = None
        unroll(model, xs, outputs="mean").mean().backward()

    return plain, ours, nullcontext


class _Over(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(16, WIDTH)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(xs.shape[1], WIDTH, device=xs.device)
        for x in xs:
            state = self.cell(x, state)
        return state


def _timesteps() -> Case:
    model, xs = _Over().cuda(), torch.zeros(24, 4, 16, device="cuda")

    @contextmanager
    def applied() -> Iterator[None]:
        handle = checkpoint_timesteps(model, chunk=4)
        try:
            yield
        finally:
            handle.remove()

    return lambda: model(xs).mean().backward(), lambda: model(xs).mean().backward(), applied


def _contrastive() -> Case:
    towers = [nn.Sequential(nn.Linear(16, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 8)).cuda() for _ in range(2)]
    batches = [torch.zeros(32, 16, device="cuda") for _ in range(2)]
    labels = torch.arange(32, device="cuda")

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(a @ b.T, labels)

    def ours() -> None:
        recoup.contrastive(loss, *zip(towers, batches, strict=True), chunk_size=8).backward()

    return lambda: loss(*(t(x) for t, x in zip(towers, batches, strict=True))).backward(), ours, nullcontext


def _optimizer(kind: str) -> Case:
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda(), torch.zeros(8, 512, device="cuda")
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }[kind]()

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, step, lambda: recoup.offload_optimizer(optimizer)


def _trained(kind: str) -> Case:
    """Two micro-batches to a step, under a watch; or batches over what the plan is for, with a warning."""
    model, x = perceptron(), torch.zeros(4096, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    number = 2 if kind == "watched" else 1
    options: dict[str, Any] = {"loss": lambda y, _: y.mean(), "optimizer": optimizer, "accumulate": number}
    plan = recoup.plan(
        model,
        x,
        budget="90%",
        device="cuda",
        cost=RooflineCost(get_device("h100-sxm")),
        actions=("rederive",),
        **options,
    )
    assert plan.decisions
    batch = x if kind == "watched" else torch.zeros(16384, 512, device="cuda")
    warned: list[warnings.WarningMessage] = []

    def step() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(number):
                model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        warned.extend(caught)

    @contextmanager
    def around() -> Iterator[None]:
        with recoup.apply(model, plan):
            if kind == "watched":
                with recoup.watch(model, budget="70GiB", loss=options["loss"], optimizer=optimizer) as steps:
                    yield
                assert steps.num_steps > 0
            else:
                yield
        assert any("over the plan's budget" in str(w.message) for w in warned) == (kind == "over")

    return step, step, around


CASES: dict[str, Callable[[], Case]] = {
    **{f"trained, {kind}": lambda kind=kind: _trained(kind) for kind in ("watched", "over")},  # type: ignore[misc]
    **{
        f"tiled {name}": lambda name=name: _tiled_loss(name)  # type: ignore[misc]
        for name in ("cross_entropy", "log_probs", "entropy", "logsumexp", "kl", "soft", "topk")
    },
    "tiles of a plan": _tiles,
    "by tensor": _by_tensor,
    "regions with random numbers": _random_regions,
    **{f"scan, {kind}": lambda kind=kind: _loop(kind) for kind in ("chunk", "slots", "budget", "free")},  # type: ignore[misc]
    "unroll": _unrolled,
    "time steps": _timesteps,
    "contrastive": _contrastive,
    **{f"offload {kind}": lambda kind=kind: _optimizer(kind) for kind in ("adamw", "fused", "sgd")},  # type: ignore[misc]
}
WAITS = ("syncs", "event_syncs")


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_no_more_than_the_plain_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Once for a module, before its first step; it compares values, which are what a block held before.
    monkeypatch.setattr(tiled, "_compare", lambda tiling: None)
    gc.collect()
    torch.cuda.empty_cache()  # of what tests before this one left: new memory is zeros, which proofs compare
    plain, ours, around = CASES[case]()
    plain()
    with stub.counting() as without:
        plain()
    with around():
        ours(), ours()
        with stub.counting() as seen:
            for _ in range(3):
                ours()
    for what in WAITS:
        assert seen[what] == 3 * without[what], what
    if not case.startswith("offload"):
        assert seen["copies_to_host"] == 3 * without["copies_to_host"]


def test_reading_an_optimizers_state_waits_once_and_removing_gives_the_mapping_back() -> None:
    model, x = nn.Linear(512, 512, device="cuda"), torch.zeros(8, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with recoup.offload_optimizer(optimizer):
        model(x).mean().backward()
        optimizer.step()
        for read in (lambda: optimizer.state[model.weight], optimizer.state_dict, lambda: dict(optimizer.state)):
            optimizer.step()
            with stub.counting() as seen:
                read(), read()
            assert seen["event_syncs"] == 1
        assert type(copy.deepcopy(optimizer.state)) is collections.defaultdict
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        optimizer.step()
        assert optimizer.state[model.weight]["exp_avg"].is_pinned()
    assert type(optimizer.state) is collections.defaultdict and optimizer.state[model.weight]["exp_avg"].is_cuda
