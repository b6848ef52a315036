"""Steps that call parts of the model alone, or other methods, and not, or not only, the model's own forward."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.ir.decision import Rebuild
from recoup.runtime.apply import apply_decisions

WIDTH = 48


class Half(nn.Module):
    """Layers in the code of one forward."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + F.dropout(F.gelu(F.layer_norm(x, (WIDTH,)) @ weight), 0.1) * torch.sigmoid(x)
        return x


class Pair(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Half(), Half()

    def encode(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


def whole(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def halves(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model.decoder(model.encode(x)), x)  # type: ignore[operator]


def noise_between(model: nn.Module, x: Tensor) -> Tensor:
    mean = model.encoder(x)  # type: ignore[operator]
    noisy = mean + torch.exp(0.5 * mean) * torch.randn_like(mean)
    return F.mse_loss(model.decoder(noisy), x) + (mean.pow(2) - mean).mean()  # type: ignore[operator]


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model.encoder(x), model.encoder(x.flip(0)))  # type: ignore[operator]


def after_a_teacher(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model.decoder(model.encoder(x))  # type: ignore[operator]
    return F.mse_loss(model.decoder(model.encoder(x)), target)  # type: ignore[operator]


def with_the_model(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).pow(2).mean() + model.encoder(x).mean()  # type: ignore[operator]
    return out


STEPS = (halves, noise_between, twice, after_a_teacher, with_the_model)


def _peak(step: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> int:
    model.zero_grad()
    held_bytes = storage_bytes([*model.parameters(), x])
    return measure_peak(lambda: step(model, x).backward(), device=torch.device("cpu"), held_bytes=held_bytes)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("budget", ["min", "60%"])
def test_a_step_that_calls_parts_alone_keeps_to_its_budget_in_every_step(
    step: Callable[[nn.Module, Tensor], Tensor], budget: str
) -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(64, 8, WIDTH)
    fit = recoup.fit(model, x, step=step, budget=budget, timed=False)
    assert fit.evidence.ok
    assert fit.plan.predicted.peak_bytes <= fit.plan.budget_bytes
    for number in range(4):
        assert _peak(step, model, x) <= fit.plan.budget_bytes * 1.005, number


def test_parts_called_alone_fit_in_what_the_models_own_forward_fits_in_and_what_one_hands_on() -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(64, 8, WIDTH)
    least = [recoup.plan(model, x, step=step, budget="min").budget_bytes for step in (whole, halves)]
    assert least[1] <= least[0] + x.nbytes


def _evaluated(model: Any, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model.decoder(model.encoder(x))
    model.train()


def _looked_at(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


BETWEEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda model, x: None,
    "an evaluation": _evaluated,
    "the model without gradients": _looked_at,
    "a forward without a backward": lambda model, x: model(x),
    "a loss that is dropped": twice,
    "a part without a backward": lambda model, x: model.encoder(x),
    "a backward of the model": lambda model, x: model(x).mean().backward(),
}


@pytest.mark.parametrize("actions", [("rebuild",), ("recompute",)], ids=str)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_runs_between_two_steps_changes_none_of_them(between: str, actions: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(64, 8, WIDTH)
    plan = recoup.plan(model, x, step=twice, budget="min", actions=actions)
    with recoup.apply(model, plan) as applied:
        for number in range(3):
            assert _peak(twice, model, x) <= plan.budget_bytes * 1.005, number
            BETWEEN[between](model, x)
            with applied.suspended():
                twice(model, x).backward()


def test_a_users_own_checkpoint_counts_no_step_of_its_own_in_backward() -> None:
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(64, 8, WIDTH)

    def step(model: Any, x: Tensor) -> Tensor:
        for part in (model.encoder, model.encoder, model.decoder):
            x = checkpoint(part, x, use_reentrant=False)
        return x.pow(2).mean()

    fit = recoup.fit(model, x, step=step, budget="min", actions=("recompute",), timed=False)
    assert fit.evidence.ok
    for _ in range(3):
        assert _peak(step, model, x) <= fit.plan.budget_bytes * 1.005


def test_a_plan_names_the_parts_that_are_called_alone() -> None:
    torch.manual_seed(0)
    plan = recoup.plan(Pair(), torch.randn(64, 8, WIDTH), step=halves, budget="60%", actions=("rebuild",))
    (decision,) = plan.decisions
    assert isinstance(decision, Rebuild)
    assert [entry.key for entry in decision.entries] == ["encode()", "decoder"]
    assert {mark.entry for mark in decision.marks} <= {"encode()", "decoder"}
    assert recoup.Plan.from_json(plan.to_json()) == plan


class Coder(nn.Module):
    """Encodes and decodes by methods of its own, in whose code the layers lie."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 7) for _ in range(4)) for _ in "ab"
        )
        self.norm = nn.LayerNorm(WIDTH)

    def through(self, x: Tensor, weights: nn.ParameterList) -> Tensor:
        for weight in weights:
            x = x + F.dropout(F.gelu(self.norm(x) @ weight), 0.1) * torch.sigmoid(x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        return self.through(x, self.down)

    def decode(self, x: Tensor) -> Tensor:
        return self.through(x, self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self(x), x)


class Holder(nn.Module):
    """Has such a model as a part."""

    def __init__(self) -> None:
        super().__init__()
        self.coder, self.head = Coder(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.coder(x))
        return out


def by_methods(model: Any, x: Tensor) -> Tensor:
    mean = model.encode(x)
    return F.mse_loss(model.decode(mean + torch.randn_like(mean)), x) + mean.pow(2).mean()


def by_one_around_forward(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.loss(x)
    return out


def by_a_parts_methods(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.head(model.coder.decode(model.coder.encode(x))).pow(2).mean()
    return out


def by_forward_and_a_method(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x).pow(2).mean() + model.encode(x).mean()
    return out


METHOD_STEPS: dict[Callable[[Any, Tensor], Tensor], tuple[type[nn.Module], list[str]]] = {
    by_methods: (Coder, ["encode()", "decode()"]),
    by_one_around_forward: (Coder, ["loss()"]),
    by_a_parts_methods: (Holder, ["coder.encode()", "coder.decode()", "head"]),
    by_forward_and_a_method: (Coder, ["", "encode()"]),
}


@pytest.mark.parametrize("step", METHOD_STEPS, ids=lambda step: step.__name__)
def test_methods_that_a_step_calls_are_planned_as_forward_is(step: Callable[[Any, Tensor], Tensor]) -> None:
    kind, keys = METHOD_STEPS[step]
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 8, WIDTH)
    before = set(vars(model))
    fit = recoup.fit(model, x, step=step, budget="35%", timed=False)
    assert fit.evidence.ok
    (decision,) = fit.plan.decisions
    assert isinstance(decision, Rebuild) and [entry.key for entry in decision.entries] == keys
    assert recoup.Plan.from_json(fit.plan.to_json()) == fit.plan
    twins = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for number, twin in enumerate([model, *twins]):
        assert _peak(step, twin, x) <= fit.plan.budget_bytes * 1.005, number
    fit.applied.remove()
    for twin in twins[1:]:
        applied = recoup.Applied.on(twin)
        assert applied is not None
        applied.remove()
    for twin in twins:
        assert _peak(step, twin, x) > fit.plan.budget_bytes * 1.5
        assert not {"encode", "decode", "loss"} & set(vars(twin))
    assert set(vars(model)) == before


def test_steps_by_methods_have_the_plain_gradients_also_of_other_sizes() -> None:
    torch.manual_seed(0)
    model = Coder()
    plain, x = copy.deepcopy(model), torch.randn(64, 8, WIDTH)
    plan = recoup.plan(model, x, step=by_methods, budget="min")
    recoup.apply(model, plan)
    for rows in (64, 64, 64, 48, 64, 48, 32):
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(rows)
            by_methods(each, x[:rows]).backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_a_plan_for_methods_is_refused_where_there_are_none() -> None:
    torch.manual_seed(0)
    plan = recoup.plan(Coder(), torch.randn(64, 8, WIDTH), step=by_methods, budget="50%", actions=("rebuild",))
    (decision,) = plan.decisions
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    marks = dataclasses.replace(decision, marks=())  # type: ignore[call-arg]
    with pytest.raises(recoup.PlanMismatch, match=r"names `encode\(\)`, which Sequential does not have"):
        apply_decisions(model, [marks])
    assert "forward" not in vars(model)


def test_a_plan_says_in_which_methods_it_holds_and_rebuilds() -> None:
    torch.manual_seed(0)
    plan = recoup.plan(Holder(), torch.randn(64, 8, WIDTH), step=by_a_parts_methods, budget="50%")
    text = " ".join(str(plan).split())
    assert "segments of coder.encode(), coder.decode(), head" in text
    assert "in coder.encode() (x" in text


class Inquiring(Coder):
    """Asks what its methods are, and what its variables."""

    def options(self, x: Tensor) -> Iterator[Tensor]:
        before = locals()
        x = torch.tanh(x)
        yield before["x"] * x


def by_inquiry(model: Any, x: Tensor) -> Tensor:
    assert model.encode.__name__ == "encode" and model.encode.__self__ is model
    assert list(inspect.signature(model.encode).parameters) == ["x"]
    (gated,) = model.options(x)
    out: Tensor = model.decode(model.encode(gated)).pow(2).mean()
    return out


def test_code_that_asks_what_a_method_is_finds_it() -> None:
    torch.manual_seed(0)
    model, x = Inquiring(), torch.randn(64, 8, WIDTH)
    fit = recoup.fit(model, x, step=by_inquiry, budget="60%", timed=False)
    assert fit.evidence.ok and isinstance(fit.plan.decisions[0], Rebuild)
    by_inquiry(model, x).backward()


def test_nothing_is_left_on_a_copy_whose_plan_was_taken_off() -> None:
    torch.manual_seed(0)
    model, x = Coder(), torch.randn(64, 8, WIDTH)
    before = pickle.dumps(model)
    recoup.fit(model, x, step=by_methods, budget="60%", timed=False)
    model.zero_grad(set_to_none=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        applied = recoup.Applied.on(twin)
        assert applied is not None
        applied.remove()
        assert len(pickle.dumps(twin)) == len(before) and b"recoup" not in pickle.dumps(twin)
