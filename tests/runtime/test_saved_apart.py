"""What a custom function saves, and whatever is saved apart from calls with a form, is rebuilt by programs too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.evidence.gradients import equal_values
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import Rebuild, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import held_recorder, saved_tensor
from recoup.runtime.rebuild.step_run import StepRun

ROWS, WIDTH, NUM_STEPS = 16, 32, 7
Step = Callable[["_Model", Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.i = 0

    def forward(self, x: Tensor) -> Tensor:
        self.i += 1
        return self.step(self, x).square().mean()


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + 10 * x.abs()) ** 2


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.exp(x * 0.1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0] * 0.1


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate = ctx.saved_tensors
        return grads[0] * (gate + x * gate * (1 - gate))


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0].t())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].t().cos()


class _Either(torch.autograd.Function):
    """Saves one of what it is handed or the other, which no call tells."""

    saves_first = True

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a if _Either.saves_first else b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (saved,) = ctx.saved_tensors
        return (None, grads[0] * saved) if _Either.saves_first else (grads[0] * saved, None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class _Kernel(torch.autograd.Function):
    """Its kernel writes to a buffer through the address, as those of Triton and of CUDA extensions do."""

    make: Any = staticmethod(torch.zeros_like)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, result = _Kernel.make(x), x.detach().double().sin().float()
        ctypes.memmove(out.data_ptr(), result.data_ptr(), out.nbytes)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].cos()


def _layers(function: Any) -> Step:
    def step(model: _Model, x: Tensor) -> Tensor:
        for layer in (model.first, model.second):
            x = torch.tanh(function.apply(torch.sin(layer(x)) * 2 + 0.5)) + 0.1
        return x

    return step


def _neurons(model: _Model, x: Tensor) -> Tensor:
    """Leaky integrate-and-fire neurons with a surrogate gradient, over time."""
    potential = out = torch.zeros(ROWS, WIDTH)
    for _ in range(5):
        potential = 0.9 * potential + model.first(x)
        spikes = _Spike.apply(potential - 0.3)
        potential = potential - spikes.detach()
        out = out + model.second(spikes)
    return out


def _own_linear(model: _Model, x: Tensor) -> Tensor:
    return torch.tanh(_Linear.apply(torch.exp(torch.sin(model.first(x))), model.second.weight))


def _lstm(model: _Model, x: Tensor) -> Tensor:
    out, _ = model.lstm(torch.tanh(torch.exp(model.first(x) * 0.3))[None])
    return torch.tanh(torch.exp(out))


def _rotary(model: _Model, x: Tensor) -> Tensor:
    turned = torch.view_as_complex(torch.sin(model.first(x)).view(ROWS, -1, 2)) * torch.polar(
        torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float()
    )
    return torch.tanh(torch.view_as_real(turned).flatten(1).exp())


def _transposed(model: _Model, x: Tensor) -> Tensor:
    q = torch.sin(model.first(x)).view(4, 4, WIDTH)
    return torch.tanh(torch.exp(q @ torch.exp(q).mT)) * torch.tanh(torch.exp(model.second(x)).T).sum()


def _parts(model: _Model, x: Tensor) -> Tensor:
    turned = torch.fft.fftn(torch.sin(model.first(x)), dim=(0, 1))
    return torch.tanh(torch.exp(turned.real * 0.1)) * torch.tanh(turned.imag)


STEPS = {
    **{function.__name__: _layers(function) for function in (_Spike, _Exp, _Swish, _Turned)},
    **{step.__name__: step for step in (_neurons, _own_linear, _lstm, _rotary, _transposed, _parts)},
}


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that began with a program kept to its end."""
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)
    monkeypatch.setattr(saved_tensor, "MIN_BYTES", 0)
    found: list[bool] = []
    close = StepRun.close

    def closes(self: StepRun) -> None:
        found.append(self.is_done)
        close(self)

    monkeypatch.setattr(StepRun, "close", closes)
    return found


def _train(
    step: Step, decisions: list[Any], before: Callable[[int], None] = lambda i: None
) -> tuple[list[Tensor], list[int]]:
    torch.manual_seed(0)
    model, found, rebuilt = _Model(step), [], []
    with apply_decisions(model, decisions) as applied:
        for i in range(NUM_STEPS):
            before(i)
            torch.manual_seed(i)
            model.zero_grad()
            num_before = applied.log.num_rederived
            loss = model(torch.randn(ROWS, WIDTH))
            loss.backward()
            rebuilt.append(applied.log.num_rederived - num_before)
            found += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return found, rebuilt


@pytest.mark.parametrize("decision", [Rebuild(path=""), Rederive(path="")], ids=["rebuild", "rederive"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_save_apart_follow_a_program(name: str, decision: Any, followed: list[bool]) -> None:
    plain, _ = _train(STEPS[name], [])
    planned, rebuilt = _train(STEPS[name], [decision])
    assert len(plain) == len(planned)
    assert all(map(equal_values, plain, planned))
    assert followed == [True] * (NUM_STEPS - 1)
    assert rebuilt[0] > 0
    assert len(set(rebuilt)) == 1  # as many as without a program


@pytest.mark.parametrize("decision", [Rebuild(path=""), Rederive(path="")], ids=["rebuild", "rederive"])
def test_a_function_that_saves_another_tensor_ends_the_program(
    decision: Any, followed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: _Model, x: Tensor) -> Tensor:
        a, b = torch.sin(model.first(x)), torch.cos(model.second(x))
        return torch.tanh(_Either.apply(torch.tanh(a) * 2, torch.tanh(b) * 2))

    def before(i: int) -> None:
        monkeypatch.setattr(_Either, "saves_first", i != 5)

    plain, _ = _train(step, [], before)
    planned, rebuilt = _train(step, [decision], before)
    assert all(map(equal_values, plain, planned))
    assert followed[:5] == [True, True, True, True, False]
    assert rebuilt[0] > 0


@pytest.mark.parametrize("decision", [Rebuild(path=""), Rederive(path="")], ids=["rebuild", "rederive"])
@pytest.mark.parametrize("make", [torch.zeros_like, lambda x: x.new_ones(x.shape), torch.clone, lambda x: x.clone()])
def test_a_buffer_that_a_kernel_writes_to_is_not_made_again(
    make: Any, decision: Any, followed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(model: _Model, x: Tensor) -> Tensor:
        x = torch.tanh(make(model.first(x)).exp())  # outside of a function it is
        return torch.tanh(torch.exp(_Kernel.apply(x * 2))) * torch.tanh(model.second(x).exp())

    monkeypatch.setattr(_Kernel, "make", make)
    plain, _ = _train(step, [])
    planned, rebuilt = _train(step, [decision])
    assert all(map(equal_values, plain, planned))
    assert followed == [True] * (NUM_STEPS - 1)
    assert rebuilt[0] > 0


def test_what_a_function_saves_is_let_go_with_it(followed: list[bool]) -> None:
    def step(model: _Model, x: Tensor) -> Tensor:
        return _layers(_Swish)(model, x).sum()

    model, x = _Model(step), torch.randn(64 * ROWS, WIDTH)
    peaks = []
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(5):
            peaks.append(measure_peak(lambda: model(x).backward(), device=torch.device("cpu"), held_bytes=0))
            model.zero_grad()
    assert followed == [True] * 4
    assert len(set(peaks)) == 1
