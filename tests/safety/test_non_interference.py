"""A training in which `fit` was called, or tried, is bit for bit the training in which it was not.

Pairwise coverage: every two settings of two different kinds occur together in some case. A dozen cases are quick.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.snapshot import random_state, set_random_state
from recoup.evidence.gradients import equal_values, same_random_state
from tests.capture.test_optimizer import Sam
from tests.thorough import cases

STEPS = 10
KINDS: dict[str, tuple[str, ...]] = {
    "model": ("mlp", "conv", "transformer"),
    "optimizer": ("sgd", "adam", "adamw", "fused", "adafactor", "lbfgs", "sam", "two", "in_backward", "accelerate"),
    "scheduler": ("none", "cosine", "onecycle", "plateau", "warmup", "cosine_after"),
    "precision": ("float32", "autocast", "scaler"),
    "moment": ("fresh", "trained", "gradients"),
    "extra": ("none", "ema", "hooks", "swa", "clipping"),
    "outcome": ("fitted", "removed", "failed", "interrupted"),
}


def pairwise(kinds: dict[str, tuple[str, ...]], *, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yields cases until every two values of two kinds have occurred together: the best of some random ones each."""
    draw, names = random.Random(seed), list(kinds)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in kinds[a] for y in kinds[b]}

    def pairs(case: dict[str, str]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2)) & missing

    while missing:
        (first, value), (second, other) = draw.choice(sorted(missing))
        tries = [{n: draw.choice(kinds[n]) for n in names} | {first: value, second: other} for _ in range(40)]
        best = max(tries, key=lambda case: len(pairs(case)))
        missing -= pairs(best)
        yield best


class Block(nn.Module):
    """A residual block with dropout and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)
        self.seen = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.mix(x, x, x, need_weights=False)[0])


def make_model(kind: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    if kind == "conv":
        return nn.Sequential(*(ConvBlock() for _ in range(3))), lambda: torch.randn(4, 4, 8, 8)
    if kind == "transformer":
        return nn.Sequential(*(Attention() for _ in range(2)), nn.Linear(16, 4)), lambda: torch.randn(4, 8, 16)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 4)), lambda: torch.randn(32, 16)


@dataclasses.dataclass
class Training:
    """One training by hand, as the case says."""

    case: dict[str, str]

    def __post_init__(self) -> None:
        self.model, self.data = make_model(self.case["model"])
        self.calls: dict[str, int] = {}
        self.per_parameter: dict[nn.Parameter, torch.optim.Optimizer] = {}
        parameters = list(self.model.parameters())
        half = len(parameters) // 2
        makers: dict[str, Callable[[], list[Any]]] = {
            "sgd": lambda: [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)],
            "adam": lambda: [torch.optim.Adam(parameters, lr=1e-3)],
            "adamw": lambda: [torch.optim.AdamW(parameters, lr=1e-3, foreach=True)],
            "fused": lambda: [torch.optim.AdamW(parameters, lr=1e-3, fused=True)],
            "adafactor": lambda: [torch.optim.Adafactor(parameters, lr=1e-3)],
            "lbfgs": lambda: [torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)],
            "sam": lambda: [Sam(parameters, torch.optim.SGD, lr=0.05, momentum=0.9)],
            "two": lambda: [torch.optim.SGD(parameters[:half], lr=0.05), torch.optim.Adam(parameters[half:], lr=1e-3)],
            "in_backward": list,
            "accelerate": self._prepared,
        }
        self.optimizers = makers[self.case["optimizer"]]()
        if self.case["optimizer"] == "in_backward":
            self.per_parameter = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in parameters}
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._step_one)
        self.schedulers: list[Any] = []
        if not self.case["scheduler"].endswith("after"):
            self._make_schedulers()
        self.scaler = torch.amp.GradScaler("cpu", enabled=self._scales())
        extra = self.case["extra"]
        self.averaged: Any = None
        if extra == "ema":
            self.averaged = [p.detach().clone() for p in parameters]
        elif extra == "swa":
            self.averaged = torch.optim.swa_utils.AveragedModel(self.model)
        elif extra == "hooks":
            self.model[1].register_forward_hook(lambda *a: self._count("forward"))
            self.model[1].register_full_backward_hook(lambda *a: self._count("backward"))
            parameters[0].register_hook(lambda g: self._count("tensor"))
            for optimizer in self.optimizers:
                wrapped = getattr(optimizer, "optimizer", optimizer)  # accelerate's has no table of hooks
                wrapped.register_step_pre_hook(lambda *a: self._count("optimizer"))

    def _scales(self) -> bool:
        return self.case["precision"] == "scaler" and self.case["optimizer"] not in ("in_backward", "lbfgs", "sam")

    def _prepared(self) -> list[Any]:
        accelerate = pytest.importorskip("accelerate")
        return [accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW(self.model.parameters(), lr=1e-3))]

    def _step_one(self, parameter: nn.Parameter) -> None:
        self.per_parameter[parameter].step()
        self.per_parameter[parameter].zero_grad()

    def _count(self, what: str) -> None:
        self.calls[what] = self.calls.get(what, 0) + 1

    def _make_schedulers(self) -> None:
        kinds: dict[str, Callable[[Any], Any]] = {
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
            "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 40, cycle_momentum=False),
            "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
            "warmup": self._warmup,
        }
        make = kinds.get(self.case["scheduler"].removesuffix("_after"))
        if make is not None:
            self.schedulers = [make(getattr(o, "optimizer", o)) for o in self.optimizers]

    @staticmethod
    def _warmup(optimizer: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        return transformers.get_linear_schedule_with_warmup(optimizer, 3, 20)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.float().square().mean()

    def _backward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self.case["precision"] == "autocast"):
            loss = self.loss(self.model(x), x)
        self.scaler.scale(loss).backward()
        return loss

    def step(self) -> None:
        x = self.data()
        loss = self._backward(x)
        if self.case["extra"] == "clipping":
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 0.5)
        for optimizer in self.optimizers:
            if self.case["optimizer"] in ("lbfgs", "sam"):

                def closure(optimizer: Any = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    return self._backward(x)

                optimizer.step(closure)
            elif self.scaler.is_enabled() and self.case["optimizer"] != "accelerate":
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler.is_enabled() and self.case["optimizer"] != "accelerate":
            self.scaler.update()
        for scheduler in self.schedulers:
            is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss.detach()) if is_plateau else scheduler.step()
        if self.case["extra"] == "ema":
            for average, parameter in zip(self.averaged, self.model.parameters(), strict=True):
                average.data.lerp_(parameter.detach(), 0.1)
        elif self.case["extra"] == "swa":
            self.averaged.update_parameters(self.model)
        self.model.zero_grad()

    def begin(self) -> None:
        """Comes to the moment at which `fit` is called."""
        if self.case["moment"] == "trained":
            for _ in range(3):
                self.step()
        elif self.case["moment"] == "gradients":
            self._backward(self.data())

    def fit(self) -> None:
        """Calls `fit`, the way the case says that it ends."""
        outcome, batch = self.case["outcome"], torch.randn(8, *self.data().shape[1:])
        optimizer = self.optimizers[0] if self.optimizers else None
        budget = "1KiB" if outcome == "failed" else "75%"
        loss = self.loss if outcome != "interrupted" else _Interrupting(self.loss)
        try:
            fitted = recoup.fit(self.model, batch, budget=budget, loss=loss, optimizer=optimizer, timed=False)
        except recoup.InfeasibleBudget as error:
            if outcome == "failed":
                return
            least = int(error.minimum_bytes * 1.02)
            try:
                fitted = recoup.fit(self.model, batch, budget=least, loss=loss, optimizer=optimizer, timed=False)
            except recoup.InfeasibleBudget:
                return
        except KeyboardInterrupt:
            return
        assert fitted.evidence.exact, fitted.evidence.differences
        if outcome == "removed":
            fitted.applied.remove()

    def state(self) -> dict[str, Any]:
        """Returns everything that has to be equal."""
        states = [o.state_dict() for o in (*self.optimizers, *self.per_parameter.values(), *self.schedulers)]
        averaged = self.averaged.state_dict() if isinstance(self.averaged, nn.Module) else self.averaged
        seen = [m.seen["calls"] for m in self.model.modules() if isinstance(m, Block)]
        gradients = [p.grad for p in self.model.parameters()]
        found = [self.model.state_dict(), states, averaged, seen, gradients, self.calls, self.scaler.state_dict()]
        return {"values": copy.deepcopy(found), "random": random_state()}


class _Interrupting:
    """A loss during whose seventh call Ctrl-C is pressed; where it is called less often, never."""

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        self.loss = loss

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        _presses.append(1)
        if len(_presses) >= 7 and torch.is_grad_enabled():
            raise KeyboardInterrupt
        return self.loss(output, batch)


_presses: list[int] = []


def equal(a: Any, b: Any) -> bool:
    """Whether two nests are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and equal_values(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or callable(a) or type(a).__module__.startswith("torch")


def run(case: dict[str, str], *, fits: bool) -> dict[str, Any]:
    """Returns the state after the training, and after `fit` itself."""
    random.seed(0)
    training = Training(case)
    torch.manual_seed(1)
    training.begin()
    state, before = random_state(), training.state()
    if fits:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.manual_seed(2)
            training.fit()
            set_random_state(state)
        after = training.state()
        assert equal(before["values"], after["values"]), "fit itself changed something"
    if case["scheduler"].endswith("after"):
        training._make_schedulers()
    training.model.zero_grad()
    for _ in range(STEPS):
        training.step()
    return training.state()


CASES = list(pairwise(KINDS))


def _check(case: dict[str, str]) -> None:
    _presses.clear()
    expected, found = run(case, fits=False), run(case, fits=True)
    assert same_random_state(expected["random"], found["random"])
    assert equal(expected["values"], found["values"])


def _name(case: dict[str, str]) -> str:
    return "-".join(case.values())


def test_the_cases_cover_all_pairs() -> None:
    for a, b in itertools.combinations(KINDS, 2):
        assert {(c[a], c[b]) for c in CASES} == set(itertools.product(KINDS[a], KINDS[b]))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if i >= 4 else ()) for i, c in enumerate(CASES[:12])], ids=_name
)
def test_a_training_is_as_if_fit_had_not_been_called(case: dict[str, str]) -> None:
    _check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(CASES[12:], CASES[12::6]), ids=_name)
def test_every_two_settings_together(case: dict[str, str]) -> None:
    _check(case)
