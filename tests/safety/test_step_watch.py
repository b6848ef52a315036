"""A training step that passes the budget of the plan in place warns once, with both numbers and why."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.profiler import ProfilerActivity, profile

import recoup
from recoup.cost.model import FlopsCost
from recoup.errors import OtherStepWarning
from recoup.ir.plan import Plan
from recoup.units import format_bytes
from tests.models import Block

WIDTH, ROWS = 32, 512


class Net(nn.Module):
    def __init__(self, *, drops: float = 0.0, classes: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, classes)
        self.drops = drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.drops or random.random() >= self.drops:
                x = block(x)
        return self.head(x)


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def _batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def _step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
    output = model(batch)
    loss = _loss(output, batch)
    del output
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()


def _warned(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if isinstance(w.message, recoup.OverBudgetWarning)]


def _planned(model: nn.Module, budget: str = "60%", **kwargs: Any) -> recoup.Fit:
    torch.manual_seed(0)
    return recoup.fit(model, _batch(), budget=budget, loss=_loss, timed=False, **kwargs)


def test_the_planned_step_is_silent_and_a_longer_batch_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    fitted = _planned(model)
    assert _warned(lambda: [_step(model, _batch()) for _ in range(5)] and None) == []
    watch = fitted.applied._watch
    assert watch is not None and 0 < watch.peak_bytes <= fitted.plan.budget_bytes
    walks: list[int] = []  # over the parameters and the optimizers: a step like those before costs none
    monkeypatch.setattr(watch, "_state_bytes", lambda: walks.append(watch._num_steps) or 0)
    for _ in range(3):
        _step(model, _batch())
    assert walks == [] and watch._num_steps == 8
    messages = _warned(lambda: [_step(model, _batch(2 * ROWS)) for _ in range(3)] and None)
    assert len(messages) == 1
    assert "over the plan's budget of" in messages[0] and "its batch has 2 times the planned one's bytes" in messages[0]
    assert messages[0].endswith("[E302]")


def _accumulates(model: nn.Module) -> None:
    for _ in range(3):
        _loss(model(_batch()), None).backward()


def _holds_logits(model: nn.Module) -> None:
    output = model(_batch())
    _loss(output, None).backward()
    model.zero_grad()


def _twice(model: nn.Module) -> None:
    (_loss(model(_batch()), None) + _loss(model(_batch()), None)).backward()


CAUSES = {
    "gradients": (_accumulates, "of gradients are there when forward begins", {}),
    "logits": (_holds_logits, "of outputs are held during backward", {"classes": 64}),
    "siamese": (_twice, "the model ran 2 times before backward", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSES)
def test_the_likely_cause_is_said(kind: str) -> None:
    run, words, made = CAUSES[kind]
    model = Net(**made)
    fitted = _planned(model, "50%")
    fitted.applied.watch(_tight(fitted))
    messages = _warned(lambda: run(model))
    assert len(messages) == 1 and words in messages[0], messages


_collected: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar("collected", default=None)


class _Collecting(Net):
    """Returns what its blocks made beside its output, gathered as transformers gathers hidden states."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden: list[torch.Tensor] = []
        token = _collected.set(hidden)
        try:
            for block in self.blocks:
                x = block(x)
                hidden.append(x)
        finally:
            _collected.reset(token)
        return self.head(x), hidden


@pytest.mark.parametrize("actions", [("recompute",), None])
def test_outputs_that_are_there_as_planned_are_no_cause(actions: tuple[str, ...] | None) -> None:
    torch.manual_seed(0)
    model = _Collecting()

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return _loss(output[0], batch)

    fitted = recoup.fit(model, _batch(), budget="min", loss=loss, timed=False, actions=actions)

    def steps() -> None:
        for _ in range(3):
            loss(model(_batch()), None).backward()
            model.zero_grad()

    assert not _warned(steps)
    assert fitted.plan.decisions


def test_a_plan_of_no_decisions_is_watched() -> None:
    model, longer = Net(), _batch(4 * ROWS)
    plan = dataclasses.replace(recoup.plan(model, _batch(), budget="100%", loss=_loss), decisions=())
    applied = recoup.apply(model, plan)
    assert repr(applied).startswith("<Applied: in place")
    assert not _warned(lambda: _step(model, _batch()))
    assert len(_warned(lambda: _step(model, longer))) == 1
    applied = recoup.apply(model, plan)
    applied.remove()
    assert not _warned(lambda: _step(model, longer))
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_a_trace_is_no_step() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.randn(4, 8)
    plan = dataclasses.replace(recoup.plan(model, batch, budget="200%", loss=_loss), decisions=())
    with recoup.apply(model, plan):
        traced = torch.jit.trace(model, batch)  # type: ignore[no-untyped-call]
        assert torch.equal(traced(batch), model(batch))


@pytest.mark.slow
def test_another_precision_and_another_optimizer_are_said() -> None:
    model = Net()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        # Not by measured prices: there are plans that need no more in float32 than this budget.
        plan = recoup.plan(model, _batch(), budget="70%", loss=_loss, cost=FlopsCost())
    assert plan.predicted.precision == "bfloat16"
    with recoup.apply(model, plan):
        messages = _warned(lambda: _step(model, _batch()))
    assert len(messages) == 1 and "it ran in float32, and bfloat16 was planned" in messages[0]

    model = Net()
    fitted = _planned(model, "60%", optimizer=torch.optim.SGD)
    fitted.applied.watch(_tight(fitted))
    adam = torch.optim.Adam(model.parameters())
    messages = _warned(lambda: [_step(model, _batch(), adam) for _ in range(3)] and None)
    assert len(messages) == 1 and "the optimizer holds" in messages[0] and "0 B planned" in messages[0]


def test_a_model_that_is_planned_and_trained_in_eval_mode_is_watched() -> None:
    """As one of `from_pretrained` is: a step of twice the batch took 1.9 of the budget without a word."""
    model = Net().eval()
    fitted = _planned(model)
    assert _warned(lambda: [_step(model, _batch()) for _ in range(3)] and None) == []
    (message,) = _warned(lambda: _step(model, _batch(2 * ROWS)))
    assert "2 times the planned one's bytes" in message
    fitted.applied.remove()
    fitted = _planned(model.train())
    model.eval()
    assert _warned(lambda: _step(model, _batch(2 * ROWS))) == [], "an evaluation"
    fitted.applied.remove()


class _Attends(nn.Module):
    """An attention whose scores are the largest products of the step, and float32 under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        with torch.autocast("cpu", enabled=False):
            scores = (q.float() @ k.float().transpose(-1, -2)).softmax(-1)
            mixed = scores @ v.float()
        return self.out(mixed.to(q.dtype))


def test_a_precision_is_that_of_modules_whatever_an_attention_computes_in() -> None:
    model, batch = nn.Sequential(nn.Linear(16, 16), _Attends(), nn.Linear(16, 16)), torch.randn(2, 256, 16)
    fitted = recoup.fit(model, batch, budget="min", loss=_loss, autocast=torch.bfloat16, timed=False)
    assert fitted.plan.predicted.precision == "bfloat16"

    def steps() -> None:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(batch)
            loss = _loss(output, batch)
            del output
            loss.backward()
            model.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    assert not [w for w in caught if isinstance(w.message, (recoup.OverBudgetWarning, OtherStepWarning))]


def test_rows_that_are_longer_are_said_of_a_batch_of_as_many_bytes() -> None:
    """Batches of as many tokens: what runs again takes the square of their length."""
    model, loss = nn.Sequential(nn.Linear(16, 16), _Attends(), nn.Linear(16, 16)), _loss
    recoup.fit(model, torch.randn(8, 64, 16), budget="min", loss=loss, timed=False)

    def said(shape: tuple[int, ...]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(model(torch.randn(shape)), None).backward()
            model.zero_grad()
        kinds = recoup.OverBudgetWarning, OtherStepWarning
        return [str(w.message) for w in caught if isinstance(w.message, kinds)]

    assert [said((8, 64, 16)) for _ in range(5)] == [[]] * 5
    assert said((16, 32, 16)) == []
    (message,) = said((2, 256, 16))
    assert "its batch has a dimension of 256, the planned one 64 at most" in message


@pytest.mark.parametrize("room", [0, 1 << 30], ids=["tight", "ample"])
def test_parameters_that_begin_to_train_are_named(room: int) -> None:
    model = Net()
    blocks = [*model.blocks[:3].parameters()]
    for parameter in blocks:
        parameter.requires_grad_(False)
    fitted = _planned(model)
    fitted.applied.watch(dataclasses.replace(_tight(fitted), budget_bytes=fitted.plan.predicted.peak_bytes + room))
    watch = fitted.applied._watch
    assert watch is not None and _warned(lambda: [_step(model, _batch()) for _ in range(3)] and None) == []
    planned_bytes = watch.peak_bytes
    for parameter in blocks[-2:]:
        parameter.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(model, _batch())  # its number is no power of two
    said = (recoup.OverBudgetWarning, recoup.OtherStepWarning)
    found = [str(w.message) for w in caught if isinstance(w.message, said)]
    num_bytes = sum(p.nbytes for p in blocks[-2:])
    assert watch.peak_bytes >= planned_bytes + num_bytes
    assert len(found) == 1 and found[0].endswith("[E303]" if room else "[E302]")
    named = f"2 parameters ({format_bytes(num_bytes)}) train that were frozen when the plan was put in place"
    assert named in found[0] and "make a plan again" in found[0] and ("no less than" in found[0]) == (not room)


def test_steps_that_are_run_as_evidence_and_plain_ones_are_not_looked_at() -> None:
    model = Net()
    adam = torch.optim.Adam(model.parameters())
    fitted = _planned(model, optimizer=adam)
    watch = fitted.applied._watch
    assert watch is not None
    _step(model, _batch(), adam)
    seen = watch._num_steps, watch.num_looked_at, len(watch._optimizers)

    def evidence() -> None:
        recoup.verify(model, fitted.plan, _batch(), loss=_loss, optimizer=adam, timed=False)
        with fitted.applied.suspended():
            for _ in range(2):
                _step(model, _batch())

    assert _warned(evidence) == []
    assert (watch._num_steps, watch.num_looked_at, len(watch._optimizers)) == seen
    _step(model, _batch(), adam)
    assert watch.num_looked_at == seen[1] + 1


def _tight(fitted: recoup.Fit) -> Plan:
    """Returns the plan with no room left in its budget."""
    return dataclasses.replace(fitted.plan, budget_bytes=fitted.plan.predicted.peak_bytes)


def test_a_plan_for_layers_dropped_at_random_holds_for_the_worst_draw() -> None:
    random.seed(7)
    before = random.getstate()
    model = Net(drops=0.5)
    plan = recoup.plan(model, _batch(), budget="60%", loss=_loss)
    assert random.getstate() == before
    assert any("largest of 9 draws" in note for note in plan.notes)
    every_layer = recoup.plan(Net(drops=-1.0), _batch(), budget="60%", loss=_loss)
    assert plan.budget_bytes == every_layer.budget_bytes
    recoup.apply(model, plan)

    def train() -> None:
        for seed in range(12):
            random.seed(seed)
            _step(model, _batch())

    assert _warned(train) == []


def test_nothing_is_left_and_others_profilers_and_copies_are_undisturbed() -> None:
    model = Net()
    hooks = dict(torch_optimizer._global_optimizer_pre_hooks), dict(torch_optimizer._global_optimizer_post_hooks)
    before = dict(model._forward_pre_hooks), dict(model._forward_hooks)
    fitted = _planned(model)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        _step(model, _batch())
    assert found.key_averages()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _warned(lambda twin=twin: _step(twin, _batch(4 * ROWS))) == []  # the copy's training is not the plan's
    model(_batch())  # a forward that no backward follows
    fitted.applied.remove()
    with profile(activities=[ProfilerActivity.CPU]):  # refused if one were still on
        _step(model, _batch())
    assert (dict(model._forward_pre_hooks), dict(model._forward_hooks)) == before
    after = dict(torch_optimizer._global_optimizer_pre_hooks), dict(torch_optimizer._global_optimizer_post_hooks)
    assert after == hooks


class Skipping(nn.Module):
    """Layers that a step may run without some of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = layer(x)
        return x


@pytest.mark.parametrize("skipping", [(3, 5), (3, 6, 7), (5, 9, 13)])
def test_steps_that_run_other_calls_are_counted_whenever_they_come(skipping: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Skipping()
    plan = recoup.plan(model, _batch(), budget="min", loss=_loss, actions=("recompute",))
    recoup.apply(model, plan)

    def train() -> None:
        for number in range(14):
            model.skipped = (1, 4) if number in skipping else ()
            _step(model, _batch())

    (said,) = _warned(train)
    assert "it ran other calls than the planned step" in said


@pytest.mark.slow
def test_most_steps_are_not_metered() -> None:
    model = Net()
    fitted = _planned(model)
    for _ in range(40):
        _step(model, _batch())
    assert fitted.applied._watch is not None and fitted.applied._watch.num_looked_at <= 8


class Tagger(nn.Module):
    """Returns its logits, and the loss too where it is given the labels, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.lm_head = nn.Linear(WIDTH, 2000, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.lm_head(self.inner(x))
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


@pytest.mark.parametrize("is_inside", [True, False], ids=["loss inside", "loss outside"])
def test_a_tiled_head_is_watched_without_its_logits_being_computed(is_inside: bool) -> None:
    model, labels = Tagger(), torch.arange(ROWS) % 2000
    batch = (_batch(), labels) if is_inside else _batch()

    def loss(output: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
        return output["loss"] if is_inside else nn.functional.cross_entropy(output["logits"], labels)

    plan = recoup.plan(model, batch, budget="min", loss=loss, actions=["tile"])
    with recoup.apply(model, plan) as applied:
        watch, held = applied._watch, []

        def step() -> None:
            held.append(model(*batch) if is_inside else model(batch))
            loss(held.pop(), batch).backward()

        assert _warned(step) == []
        assert watch is not None and watch.peak_bytes == plan.predicted.peak_bytes and watch.num_looked_at == 1
        assert applied.log.num_logits_made == 0


def test_a_change_in_place_is_noticed_in_a_step_that_is_counted() -> None:
    model, is_overwritten = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]), False
    model[3].register_forward_hook(lambda _, args, output: output.zero_() if is_overwritten else None)
    x = torch.randn(64, 32)
    plan = recoup.plan(model, x, budget="min", loss=lambda output, _: output.mean(), actions=["recompute"], keep="3")
    assert plan.decisions
    with recoup.apply(model, plan) as applied:
        is_overwritten = True
        loss = model(x).mean()
        assert applied._watch is not None and applied._watch.num_looked_at == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_another_precision_is_said_where_no_module_below_the_model_has_weights() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = x + nn.functional.gelu(x @ weight) * torch.sigmoid(x @ weight.t())
            return x.square().mean()

    model, x = Bare(), torch.randn(512, 64)
    made = recoup.plan(model, x, budget="80%", loss=lambda out, batch: out)
    with recoup.apply(model, made), pytest.warns(UserWarning, match="in bfloat16,"):
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x)
            loss.backward()


def test_gradients_that_the_loss_is_made_of_are_no_backward_of_the_step() -> None:
    torch.manual_seed(0)
    model, batch = Net(classes=64), _batch()

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.detach().requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss: torch.Tensor = output.mean() + gradient.square().mean()
        return loss

    fitted = recoup.fit(model, batch, step=step, budget="min", timed=False)
    assert fitted.evidence is not None and fitted.evidence.within_budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad()
            step(model, batch).backward()
    fitted.applied.remove()


def test_no_gradient_of_a_parameter_that_is_swapped_for_a_result_is_read() -> None:
    torch.manual_seed(0)
    model, batch = Net(), _batch()

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
        swapped = {n: p + 0.01 * g for (n, p), g in zip(model.named_parameters(), gradients, strict=True)}
        loss: torch.Tensor = torch.func.functional_call(model, swapped, (batch,)).square().mean()
        return loss

    fitted = recoup.fit(model, batch, step=step, budget="90%", timed=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(model, batch).backward()
    fitted.applied.remove()


@pytest.mark.parametrize("num_before", [3, 4, 5, 6])
def test_two_forwards_before_one_backward_are_seen_whichever_are_counted(num_before: int) -> None:
    model = Net()
    fitted = _planned(model)

    def pairs() -> None:
        for _ in range(3):
            (_loss(model(_batch()), None) + _loss(model(_batch()), None)).backward()
            model.zero_grad()

    assert _warned(lambda: [_step(model, _batch()) for _ in range(num_before)] and None) == []
    message, *others = _warned(pairs)
    assert not others and "ran 2 times before backward" in message
    fitted.applied.remove()


def test_smaller_batches_whose_gradients_add_up_fit() -> None:
    model = Net()
    fitted = _planned(model, "min")

    def halves() -> None:
        for half in _batch().chunk(2) * 3:
            _loss(model(half), None).backward()
        model.zero_grad()

    assert _warned(halves) == []
    fitted.applied.remove()
