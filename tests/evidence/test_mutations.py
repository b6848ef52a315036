"""The engine broken on purpose, one way at a time: `verify` has to say so, or the step has to refuse.

Each case first shows that the same plan on the whole engine is proved exact, so that what is caught is the mutation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.cost.model import FlopsCost
from recoup.evidence.verify import verify_plan
from recoup.ir.decision import Decision, Loop, Offload, Recompute, Rederive, Scan, TileLoss, TileModule
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.recurrent import scan
from recoup.recurrent.loop import Loop as ScanLoop
from recoup.recurrent.tape import Sums
from recoup.runtime.offload.transport import DiskTransport
from recoup.runtime.rebuild import kept, rederived
from recoup.runtime.recompute import frame, inputs, module_state, region, rng_state, saved_outputs
from recoup.runtime.tile.loss import function as loss_function
from recoup.runtime.tile.loss import math as loss_math
from recoup.runtime.tile.module import rows as tile_rows

WIDTH = 24


class Block(nn.Module):
    """Saves what each engine drops: products, activations, a mask, a part of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate).clamp(max=0.4) * torch.tanh(value * 0.5)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(3)))
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(x.shape[0] == 17)):
            return self.statistics(self.layers(x)).square().mean()


class Counting(nn.Module):
    """Scales by a number that it counts up in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, WIDTH)
        self.calls = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 0.25
        return torch.tanh(self.step(x) * self.calls)


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.cell(x)
        self.cell.calls = 1.0
        return x.square().mean()


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(h: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(self.inner(h) + now)
            return h, h

        return scan(step, x.expand(12, *x.shape) * 0.1, torch.zeros_like(x), outputs="mean")[1].square().mean()


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 80)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.mlp(self.embed(x))).flatten(0, 1), x.flatten())


REGIONS = tuple(Recompute(path=f"layers.{i}") for i in range(3))
SPAN = (Recompute(path="layers.0", span=("layers.1",)), Recompute(path="statistics"))
PLANS: dict[str, tuple[Callable[[], nn.Module], tuple[Decision, ...]]] = {
    "regions": (Blocks, (*REGIONS, Recompute(path="statistics"))),
    "keeping": (Blocks, tuple(dataclasses.replace(r, keep=(f"matmul:{WIDTH}x{2 * WIDTH}",)) for r in REGIONS)),
    "span": (Blocks, SPAN),
    "rederive": (Blocks, (Rederive(path=""),)),
    "offload": (Blocks, (Offload(path="layers.0"), Offload(path="layers.1"))),
    "loop": (Unrolled, (Loop(path="cell", chunk=3),)),
    "scan": (Scanned, (Scan(path="", index=0, budget_bytes=20_000),)),
    "tile": (Language, (TileLoss(path="head", tile_tokens=16),)),
    "tile module": (Language, (TileModule(path="mlp", tile_tokens=16),)),
}


# Smaller tensors are neither rebuilt nor moved.
ROWS = {"rederive": 512, "offload": 12_000}


def evidence_of(name: str, *, rows: int | None = None) -> Evidence:
    rows = rows or ROWS.get(name, 16)
    torch.manual_seed(0)
    make, decisions = PLANS[name]
    model = make().train()
    batch = torch.randint(80, (4, rows)) if make is Language else torch.randn(rows, WIDTH)
    plan: Plan = recoup.plan(copy.deepcopy(model), batch, budget="100%", cost=FlopsCost(), actions=())
    return verify_plan(model, dataclasses.replace(plan, decisions=decisions), batch, timed=False)


def is_proved(evidence: Evidence, name: str) -> bool:
    tiles = name.startswith("tile")
    return evidence.values_hold and evidence.buffers_equal and evidence.rng_equal and (tiles or evidence.exact)


@pytest.mark.parametrize("name", PLANS)
def test_the_whole_engine_is_proved(name: str) -> None:
    evidence = evidence_of(name)
    assert is_proved(evidence, name), evidence.differences


# -- mutations ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def after(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a mutation of a function: what it returns is changed."""
    return lambda whole: lambda *args, **kwargs: change(whole(*args, **kwargs))


def instead(other: Any) -> Callable[[Any], Any]:
    return lambda whole: other


def nudged(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with its last element a little larger: no sampled byte need show it."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    found = tensor.clone()
    found.flatten()[-2:-1].add_(0.5) if found.is_contiguous() else found.add_(0.01)
    return found


def _second(whole: Any) -> Any:
    """Every second call of an adding function does nothing."""
    count = [0]

    def mutated(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return whole(*args, **kwargs) if count[0] % 2 else None

    return mutated


def _stale_first(whole: Any) -> Any:
    """A chain gives the contents of what its last op read, not of what that op made."""

    def mutated(self: Any, made: Any, value: Any) -> torch.Tensor:
        first = self.contents(made.reads[0].value).clone()
        out = whole(self, made, value)
        return first.as_strided(out.size(), out.stride()) if first.numel() >= out.numel() else out * 0

    return mutated


def _one_op_skipped(whole: Any) -> Any:
    def mutated(value: Any) -> Any:
        out = whole(value)
        return out if out is None else torch.zeros_like(out)

    return mutated


def _without_offset(whole: Any) -> Any:
    def mutated(tensor: torch.Tensor, geometry: Any) -> torch.Tensor:
        size, stride, _, dtype = geometry
        return whole(tensor, (size, stride, 0, dtype))

    return mutated


def _swapped_slots(whole: Any) -> Any:
    """Tensors of one shape come back in another order: an off-by-one in the slots."""

    def mutated(self: Any, tensor: torch.Tensor) -> Any:
        slot = whole(self, tensor)
        if len(self.slots) > 1:
            before = self.slots[-2]()
            if before is not None and before.kind[:2] == slot.kind[:2]:
                self.slots[-1], self.slots[-2] = self.slots[-2], self.slots[-1]
        return slot

    return mutated


def _other_inputs(whole: Any) -> Any:
    def mutated(self: Any, previous: Any) -> Any:
        args, kwargs = whole(self, previous)
        return tuple(a.roll(1, 0) if isinstance(a, torch.Tensor) else a for a in args), kwargs

    return mutated


def _input_of_the_first(whole: Any) -> Any:
    """In a span the second call is handed the first one's input, not its output."""
    first: list[Any] = []

    def mutated(self: Any, previous: Any) -> Any:
        args, kwargs = whole(self, previous)
        if not previous:
            first[:] = args
        return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in first) if previous else args, kwargs

    return mutated


def _detached(whole: Any) -> Any:
    def mutated(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs).detach().requires_grad_()

    return mutated


def _wrong_state(whole: Any) -> Any:
    return lambda self, step: whole(self, max(step - 1, 0))


def _first_of_all(whole: Any) -> Any:
    """Every block comes back as the first that was moved with as many bytes."""
    known: dict[int, torch.Tensor] = {}

    def mutated(self: Any, handle: Any) -> torch.Tensor:
        found = whole(self, handle)
        return known.setdefault(found.numel(), found.clone()).clone()

    return mutated


def _no_op_in_replay(whole: Any) -> Any:
    def mutated(x: torch.Tensor) -> torch.Tensor:
        return x * 1 if recoup.is_recomputing() else whole(x)

    return mutated


# What is broken: (plan, what is changed, how).
MUTATIONS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "random numbers are drawn anew in a replay": ("regions", rng_state.RandomState, "replayed", instead(nothing)),
    "a buffer is written again in a replay": ("regions", module_state.AttributeState, "replayed", instead(nothing)),
    "an op is skipped in a replay": ("regions", torch, "tanh", _no_op_in_replay),
    "inputs of a replay in another order": ("regions", inputs.Inputs, "rebuild", _other_inputs),
    "slots are off by one": ("regions", frame.Frame, "_pack", _swapped_slots),
    "a region's gradient is dropped": ("regions", region, "run_region", _detached),
    "what a replay saved is not what comes back": ("regions", frame.Slot, "unpack", after(nudged)),
    "a kept result is another's": ("keeping", saved_outputs, "_alias", after(nudged)),
    "a span goes on with a stale tensor": ("span", inputs.Inputs, "rebuild", _input_of_the_first),
    "a chunk begins with later attributes": ("loop", module_state.AttributeState, "replayed", instead(nothing)),
    "a chunk's slots are off by one": ("loop", frame.Frame, "_pack", _swapped_slots),
    "a chain of one op is not run": ("rederive", rederived, "_one_op", _one_op_skipped),
    "a chain ends one op early": ("rederive", rederived._Rebuild, "_run", _stale_first),
    "a rebuilt part begins where the whole does": ("rederive", rederived, "laid", _without_offset),
    "a mask comes back as ones": ("rederive", kept.KeptCompact, "contents", after(torch.ones_like)),
    "a source is read after it was written": ("rederive", kept.Kept, "contents", after(nudged)),
    "a rebuilt tensor is a little off": ("rederive", rederived, "fitted", after(nudged)),
    "a block of the host is another's": ("offload", DiskTransport, "get", _first_of_all),
    "a block of the host lost its end": ("offload", DiskTransport, "get", after(lambda t: t * (t != t[-1]))),
    "a step of a scan starts from an earlier state": ("scan", ScanLoop, "_load", _wrong_state),
    "a scan's sum of gradients misses steps": ("scan", Sums, "take", _second),
    "gradients of every second tile are dropped": ("tile", loss_function._Gradients, "add", _second),
    "a tile's gradient is scaled twice": ("tile", loss_math.CrossEntropyTile, "gradient", after(lambda t: t * 1.001)),
    "sums over every second tile of a module": ("tile module", tile_rows._Sums, "add", _second),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_engine_is_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, mutate = MUTATIONS[mutation]
    ran = [False]
    whole = getattr(owner, attribute)
    broken = mutate(whole)

    def noting(*args: Any, **kwargs: Any) -> Any:
        ran[0] = True
        return broken(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, noting)
    try:
        evidence = evidence_of(name)
    except (recoup.RecoupError, RuntimeError):
        caught = True
    else:
        caught = not is_proved(evidence, name)
    assert ran[0], "the mutation was never reached"
    assert caught


def test_a_replay_in_another_precision_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evidence_of("regions", rows=17).exact
    monkeypatch.setattr(rng_state.AutocastState, "replayed", nothing)
    with pytest.raises(recoup.ReplayError):
        evidence_of("regions", rows=17)
