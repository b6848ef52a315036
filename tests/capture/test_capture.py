"""A captured step: exact bytes, exact FLOPs, nothing touched."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.errors import StepError
from recoup.evidence.memory import measure_peak, storage_bytes
from tests.models import KINDS, make, plain_step, same, step


def _saved_bytes(trace) -> int:
    forward = sum(1 for o in trace.ops if o.phase in ("forward", "loss"))
    return sum(s.nbytes for s in trace.storages if s.category == "saved" and s.alloc_op < forward <= s.free_op)


def test_saved_bytes_and_flops_of_an_mlp_are_exact() -> None:
    batch, width = 16, 8
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 1))
    trace = capture(
        StepSpec(model=model, batch=torch.randn(batch, width), objective=Objective(loss=lambda out, _: out.sum()))
    )
    assert _saved_bytes(trace) == 4 * batch * 4 * width  # tanh's result; the batch is held anyway
    matmuls = [trace.signatures[o.signature] for o in trace.ops]
    flops = sum(s.flops for s in matmuls if "mm" in s.name)
    first, second = 2 * batch * width * 4 * width, 2 * batch * 4 * width
    assert flops == first + second + first + 2 * second  # weights twice, the input of the second once


@pytest.mark.parametrize("kind", KINDS)
def test_fake_peak_is_the_allocators(kind: str) -> None:
    model, batch, loss = make(kind)
    trace = capture(StepSpec(model=model, batch=batch, objective=Objective(loss=loss)))
    assert trace.source == "fake"
    held = storage_bytes([*model.parameters(), *model.buffers()])
    held += sum(s.nbytes for s in trace.storages if s.category == "batch")
    step(model, batch, loss)
    model.zero_grad()

    def run() -> None:
        value = Objective(loss=loss).run(model, batch)
        value.backward()

    measured = measure_peak(run, device=torch.device("cpu"), held_bytes=held)
    tolerance = 0.25 if kind == "conv" else 0.02  # oneDNN's own buffers weigh much in a tiny network
    assert max(trace.levels()) == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_touched(kind: str) -> None:
    model, batch, loss = make(kind)
    step(model, batch, loss)
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    torch.manual_seed(5)
    capture(StepSpec(model=model, batch=batch, objective=Objective(loss=loss), optimizer=torch.optim.AdamW))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert [id(p) for p in model.parameters()] == identities
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert same(step(model, batch, loss), plain_step(make(kind)[0], batch, loss)) or kind in ("batch-norm", "conv")


def test_nothing_is_touched_after_an_exception() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            raise ValueError("no")

    model = Broken()
    weight = model.linear.weight
    with pytest.raises(StepError, match=r"forward of Broken failed.*ValueError: no"):
        capture(StepSpec(model=model, batch=torch.randn(2, 4)))
    assert model.linear.weight is weight
    assert model.calls == 0
    assert not model.linear._forward_hooks


def test_data_dependent_models_are_captured_for_real_and_that_is_said() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            self.seen += 1
            return y[y.sum(1) > float(y.mean())].sum()

    model = Picks()
    trace = capture(StepSpec(model=model, batch=torch.randn(8, 4)))
    assert trace.source == "real"
    assert trace.reason
    assert model.seen.item() == 0
    assert model.linear.weight.grad is None


def test_meta_models_tied_weights_and_reused_modules() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.mix = nn.Linear(8, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.mix(self.mix(self.embed(ids)))
            return {"loss": self.head(x).logsumexp(-1).mean()}

    with torch.device("meta"):
        model = Tied()
    trace = capture(StepSpec(model=model, batch=torch.zeros(4, dtype=torch.long)))
    assert [c.index for c in trace.calls if c.path == "mix"] == [0, 1]
    weights = [s for s in trace.storages if s.category == "parameter"]
    assert sum(s.nbytes for s in weights) == 4 * (80 + 64 + 8)  # the tied weight once


def test_a_step_on_meta_that_needs_values_says_what_to_do() -> None:
    """A mixture of experts that looks up the tokens of each."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(8, 2), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (rows,) = torch.where(self.gate(x).argmax(-1) == 1)
            return x.index_add(0, rows, self.expert(x[rows]))

    with torch.device("meta"):
        model = Experts()
    with pytest.raises(StepError, match=r"of Experts cannot be followed .*nonzero.*on a real device.*batched_mm"):
        capture(StepSpec(model=model, batch=torch.zeros(4, 8)))


def test_optimizer_state_counts() -> None:
    model = nn.Linear(64, 64)
    trace = capture(
        StepSpec(
            model=model,
            batch=torch.randn(2, 64),
            objective=Objective(loss=lambda o, _: o.sum()),
            optimizer=torch.optim.Adam,
        )
    )
    state = sum(s.nbytes for s in trace.storages if s.category == "optimizer")
    assert state >= 2 * 4 * (64 * 64 + 64)
    assert any(o.phase == "optimizer" for o in trace.ops)


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.ReLU(), None, "has no parameters"),
        (nn.Linear(4, 4), lambda o, _: o, "must be a scalar"),
        (nn.Linear(4, 4), lambda o, _: 3.0, "must be a scalar tensor"),
        (nn.Linear(4, 4).requires_grad_(False), None, "nothing to differentiate"),
        (nn.Linear(4, 4), lambda o, _: o.detach().sum(), "has no gradient"),
        (nn.Linear(5, 4), None, "failed on this batch"),
    ],
)
def test_steps_that_cannot_be(model: nn.Module, loss, message: str) -> None:
    with pytest.raises(StepError, match=message):
        capture(StepSpec(model=model, batch=torch.randn(2, 4), objective=Objective(loss=loss)))


def test_a_backward_that_fails_without_a_plan_is_said_to() -> None:
    class Overwrites(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(super().forward(x))
            x[:, :1] = 0
            return x.mean()

    model, x = Overwrites(4, 4), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="output 0 of Tanh") as torchs:
        model(x).backward()
    with pytest.raises(StepError, match="The backward of Overwrites fails on this batch without a plan too") as caught:
        capture(StepSpec(model=model, batch=x))
    assert str(torchs.value).split(", which")[0] in str(caught.value) and ".." not in str(caught.value)


def test_a_step_that_calls_backward_is_told_so() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).sum()
        loss.backward()
        return loss

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    with pytest.raises(StepError, match="recoup calls backward: does the step call it too"):
        capture(StepSpec(model=model, batch=x, objective=Objective(step=step)))


def test_a_failing_step_is_not_searched_for_in_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(input=torch.relu(self.first(x)))

    collect, generations = gc.collect, list[int]()

    def noted(generation: int = 2) -> int:
        generations.append(generation)
        return collect(generation)

    monkeypatch.setattr(gc, "collect", noted)
    with pytest.raises(StepError, match="failed on this batch"):
        capture(StepSpec(model=Fails(), batch=torch.randn(2, 4), objective=Objective(loss=lambda o, _: o.sum())))
    assert generations == [1], "a full collection takes a second where transformers and jax are loaded"


def test_what_the_next_call_takes_at_once_is_saved_by_that_call() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.LeakyReLU(), torch.nn.Conv2d(2, 2, 1))
    trace = capture(
        StepSpec(model=model, batch=torch.ones(1, 2, 4, 4), objective=Objective(loss=lambda output, _: output.sum()))
    )
    activation = next(i for i, o in enumerate(trace.ops) if "leaky_relu" in trace.signatures[o.signature].name)
    (result,) = (s for s in trace.storages if s.alloc_op == activation)
    assert "convolution" in trace.signatures[trace.ops[result.saved_op].signature].name
    assert result.saved_op == activation + 1


def test_a_tensor_outside_of_the_model_is_there_once_however_it_is_viewed() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 16)
    weight, head = torch.randn(64, 64), nn.Linear(64, 64)
    outside = [weight, *head.parameters()]

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (head(model(x)) @ weight.t()).expand(2, 32, 64)[1].pow(2).mean()

    planned = recoup.plan(model, x, step=step, budget="100%").predicted.plain_peak_bytes
    held = storage_bytes([*model.parameters(), x, *outside])
    assert planned == measure_peak(lambda: step(model, x).backward(), device=torch.device("cpu"), held_bytes=held)


def test_a_view_of_a_number_is_no_view() -> None:
    """`aten._conj` of the complex number that a tensor is multiplied by."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (torch.view_as_complex(model(x)) * 1j).abs().mean()

    assert recoup.plan(nn.Linear(4, 2), torch.randn(8, 4), step=step, budget="100%").decisions == ()


class _OfTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 1 + b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * 1, gradient * 2


class _Summed(nn.Module):
    """Ends in a layer whose sum is taken: logits, for all that a search for a head can see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.layer(x.sin()))
        h = self.layer(_OfTwo.apply(h.softmax(1), h))
        return self.layer(torch.cat([h.sigmoid(), h.sigmoid()], 1)[:, 32:96]).sum() / h.numel()


def test_logits_that_are_not_there_yet_are_no_state() -> None:
    made = recoup.plan(_Summed(), torch.randn(512, 64), budget="min").predicted
    assert made.peak_bytes <= made.plain_peak_bytes
