"""A step that is as the one before follows its program; whatever differs is recorded, and the bits are the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup.evidence.gradients import equal_values
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import Rebuild
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import held_recorder
from recoup.runtime.rebuild.step_run import StepRun

ROWS, WIDTH, NUM_STEPS = 8, 16, 8
Step = Callable[["_Model", Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))
        self.shift: Tensor
        self.i = 0

    def forward(self, x: Tensor) -> Tensor:
        self.i += 1
        return self.step(self, x).square().mean()


def _same(model: _Model, x: Tensor) -> Tensor:
    return torch.tanh(model.second(torch.sin(model.first(x) + model.shift)).exp())


def _swapped(model: _Model, x: Tensor) -> Tensor:
    a, b = torch.sin(model.first(x)), torch.cos(model.second(x))
    if model.i > 4:
        a, b = b, a
    return torch.exp(a) * torch.tanh(b - a)


def _attention(model: _Model, x: Tensor) -> Tensor:
    q = torch.sin(model.first(x)).view(1, 2, ROWS, WIDTH // 2)
    torch.backends.cuda.enable_flash_sdp(model.i < 5)
    try:
        return torch.tanh(F.scaled_dot_product_attention(q, q * 2, q + 1))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def _gradients_off(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))
    with torch.set_grad_enabled(model.i < 5):
        z = torch.exp(y * 2)
    return torch.tanh(y) * z


def _turned(model: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():  # as positions are turned into angles
        angles = torch.cos(model.shift * 3)
    return torch.tanh(torch.exp(model.first(x)) * angles)


def _buffer_written(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x) + model.shift)
    if model.i == 6:
        model.shift.add_(1)
    return torch.exp(y) * (model.shift + 1)


def _written_between(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))
    z = torch.exp(y + 0)
    if model.i > 5:
        y.mul_(0.5)
    return torch.tanh(z) * torch.sigmoid(model.second(z) + y)


def _zeros_sign(model: _Model, x: Tensor) -> Tensor:
    return torch.atan2(torch.sin(model.first(x)) * (-0.0 if model.i > 4 else 0.0), torch.exp(-model.second(x)))


def _behind_python(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))
    z = _Double.apply(y) if model.i != 5 else y.T.contiguous().T * 2
    return torch.tanh(z) * torch.exp(y.T).T


def _looks(model: _Model, x: Tensor) -> Tensor:
    y = torch.exp(model.first(x))
    return torch.sin(y) if y.sum().item() > (0 if model.i < 6 else 1e9) else torch.cos(y)


def _lists(model: _Model, x: Tensor) -> Tensor:
    parts = torch.sin(model.first(x)).split(WIDTH // 4, -1)
    order = [1, 0, 3, 2] if model.i > 4 else [0, 1, 2, 3]
    return torch.tanh(torch.cat([parts[i] for i in order], -1) * torch.stack(parts, 1).sum(1).repeat(1, 4))


def _masked(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))
    chosen = torch.exp(y)[x.detach() * (-1) ** model.i > 0]  # as many as the contents say
    rows = torch.exp(y)[torch.arange(ROWS) % 3]
    return torch.tanh(chosen * 2).sum() + torch.tanh(rows * y)


def _one_memory(model: _Model, x: Tensor) -> Tensor:
    a, b = x.detach(), (x.detach() if model.i < 5 else x.detach() * 3)  # two tensors over one memory, and not
    return torch.tanh(torch.sin(model.first(x)) + torch.exp(_behind(a)) * torch.sin(_behind(b)))


def _behind(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x.detach()


def _autocast_inside(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))
    with torch.autocast("cpu", torch.bfloat16, enabled=model.i > 5):
        z = torch.exp(y @ y.t())
    return torch.tanh(z.float()) * torch.sigmoid(z.float())


def _slices(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x)).flatten()
    state = torch.zeros(WIDTH)
    for t in range(ROWS * WIDTH - WIDTH):  # each slice lies elsewhere
        state = torch.tanh(state + y[t : t + WIDTH] * 0.5)
    return state


def _view_of_a_parameter(model: _Model, x: Tensor) -> Tensor:
    y = model.first.weight.expand(2, WIDTH, WIDTH)
    return torch.tanh(torch.exp(y) * torch.sin(model.second(x)).sum())


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        ctx.save_for_backward(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out, x = ctx.saved_tensors
        return grads[0] * out / x.where(x != 0, 1.0)


def _views_of_calls_without_form(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))[... if model.i < 7 else (slice(None), slice(0, 8))]
    return torch.tanh(y * 2) * torch.exp(y)  # all of it is an alias, which is what `recoup.hold` dispatches


def _memory_used_again(model: _Model, x: Tensor) -> Tensor:
    for _ in range(4):  # what a call without form returns lies where a result lay that is gone
        x = torch.sin(model.first(torch.rand_like(x) * torch.tanh(x)))
    return x


def _indices_written(model: _Model, x: Tensor) -> Tensor:
    ids = torch.zeros(ROWS, dtype=torch.int64)  # as labels are shifted to the right
    ids[1:] = torch.arange(ROWS - 1).clone()
    ids[0] = 3
    ids.masked_fill_(ids == 2, 5 if model.i < 6 else 4)
    return torch.tanh(torch.exp(F.embedding(ids, model.first.weight)) * torch.sin(model.second(x)))


def _added(model: _Model, x: Tensor) -> Tensor:
    y, rows = torch.exp(model.first(x)), torch.arange(ROWS) // 2
    sums = torch.zeros(ROWS, WIDTH).index_add_(0, rows, y)  # has a gradient from here on
    return torch.tanh(sums[rows] * y) * torch.sin(model.second(y))


def _spectra(model: _Model, x: Tensor) -> Tensor:
    for _ in range(3):  # a product of what lies in a complex tensor's memory has no form
        x = torch.tanh(torch.exp(torch.fft.fftn(torch.sin(model.first(x)), dim=(0, 1)).real * 0.1))
    return x


def _branch(model: _Model, x: Tensor) -> Tensor:
    y = torch.sin(model.first(x))
    unused = torch.tanh(torch.exp(y) * 2).exp()  # as the last reset of a neuron: gone before the step ends
    z = torch.tanh(torch.exp(y * 3))
    del unused
    return torch.tanh(model.second(z))


STEPS = [
    *(_same, _swapped, _attention, _gradients_off, _buffer_written, _written_between, _zeros_sign, _behind_python),
    *(_looks, _lists, _masked, _one_memory, _autocast_inside, _slices, _view_of_a_parameter),
    *(_views_of_calls_without_form, _memory_used_again, _turned, _indices_written, _branch, _added, _spectra),
]


def _train(step: Step, decisions: list[Any]) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model = _Model(step)
    applied = apply_decisions(model, decisions)
    found = []
    for i in range(NUM_STEPS):
        loss = model(x)
        if i == 3:
            loss = loss + model(x * 0.5)  # two forwards before one backward
        loss.backward(retain_graph=i == 2)
        if i == 2:
            loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in [x, *model.parameters()] if p.grad is not None]]
        found.append(model.shift.clone())
    applied.remove()
    return found, applied


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that began with a program kept to it."""
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)
    found: list[bool] = []
    real = StepRun.__init__

    def begin(self: StepRun, *args: Any) -> None:
        real(self, *args)
        found.append(True)

    def end(self: StepRun, recorder: Any) -> None:
        found[-1] = False
        real_end(self, recorder)

    real_end = StepRun.end_early
    monkeypatch.setattr(StepRun, "__init__", begin)
    monkeypatch.setattr(StepRun, "end_early", end)
    return found


@pytest.mark.filterwarnings("ignore:.*took a step that its plan was not made for.*")
@pytest.mark.parametrize("step", STEPS)
def test_what_differs_from_the_program(step: Step, followed: list[bool]) -> None:
    plain, _ = _train(step, [])
    planned, applied = _train(step, [Rebuild(path="")])
    assert len(plain) == len(planned)
    assert all(map(equal_values, plain, planned))
    assert applied.log.num_rederived > 0
    assert (
        followed and all(followed)
        if step in (_same, _slices, _view_of_a_parameter, _turned, _branch, _added)
        else step in (_behind_python, _written_between, _masked, _one_memory) or True in followed
    )


def test_what_is_new_to_a_step_takes_no_closer_look(followed: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    real = StepRun.next_call
    monkeypatch.setattr(StepRun, "next_call", lambda self, *call: looked.append(call[0]) or real(self, *call))
    model, x = _Model(_same), torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(5):
            model(x).backward()
    assert followed == [True] * 4
    assert not looked


def test_a_call_is_known_by_what_it_was_handed_before_it_wrote(followed: list[bool]) -> None:
    model, x = _Model(_added), torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(5):
            model(x).backward()
    assert followed == [True] * 4


def test_an_exception_ends_a_program_and_nothing_else(followed: list[bool]) -> None:
    def step(model: _Model, x: Tensor) -> Tensor:
        y = torch.sin(model.first(x))
        if model.i == 4:
            raise KeyError(model.i)
        return torch.tanh(model.second(y))

    model, x = _Model(step), torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for i in range(1, 7):
            if i == 4:
                with pytest.raises(KeyError):
                    model(x)
            else:
                model(x).backward()
    assert followed == [True] * 5
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


def test_an_evaluation_between_steps_has_a_program_of_its_own(followed: list[bool]) -> None:
    model, x = _Model(_same), torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(5):
            model(x).backward()
            model.eval()(x)
            model.train()
    assert followed == [True] * 8


@pytest.mark.filterwarnings("error:.*took a step that its plan was not made for.*")
def test_a_step_that_follows_a_program_is_no_other_step(followed: list[bool]) -> None:
    model, x = _Model(_same), torch.randn(ROWS, WIDTH)
    counts: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: counts.append(1) or t, lambda t: t):
        model(x)
    with apply_decisions(model, [Rebuild(path="", num_saved=len(counts))]):
        for _ in range(5):
            model(x).backward()
    assert followed == [True] * 4


@pytest.mark.parametrize("step", [_same, _branch])
def test_a_program_needs_no_more_memory_than_the_record(step: Step, followed: list[bool]) -> None:
    model, x = _Model(step), torch.randn(64 * ROWS, WIDTH)
    peaks = []
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(4):
            peaks.append(measure_peak(lambda: model(x).backward(), device=torch.device("cpu"), held_bytes=0))
            model.zero_grad()
    assert followed == [True] * 3
    assert len(set(peaks)) == 1


def test_a_call_without_form_holds_nothing_in_a_program(followed: list[bool]) -> None:
    lives: list[list[bool]] = []

    def step(model: _Model, x: Tensor) -> Tensor:
        read: list[weakref.ref[torch.UntypedStorage]] = []
        for _ in range(3):
            spectrum = torch.fft.fftn(torch.sin(model.first(x)), dim=(0, 1))
            read.append(weakref.ref(spectrum.untyped_storage()))
            y = spectrum.real * 0.1  # which lies in a complex tensor's memory: the product has no form
            del spectrum
            x = torch.tanh(torch.exp(y))
        lives.append([ref() is not None for ref in read])
        return x

    model, x = _Model(step), torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(5):
            model(x).backward()
    assert followed == [True] * 4
    assert lives[1:] == [[False] * 3] * 4


def _residuals(model: _Model, x: Tensor) -> Tensor:
    for _ in range(5):
        x = x + 0.1 * torch.tanh(torch.exp(torch.tanh(torch.exp(model.first(x) * 0.3)) * 0.3))
    return x


def test_nor_does_one_that_rebuilds_in_pieces(followed: list[bool]) -> None:
    model, x = _Model(_residuals), torch.randn(64 * ROWS, WIDTH)
    decisions = recoup.plan(model, x, budget="min", device="cpu-generic").decisions
    assert any(mark.begins_piece for decision in decisions for mark in decision.marks)  # type: ignore[attr-defined]
    peaks = []
    with apply_decisions(model, decisions):
        for _ in range(5):
            peaks.append(measure_peak(lambda: model(x).backward(), device=torch.device("cpu"), held_bytes=0))
            model.zero_grad()
    assert followed == [True] * 4
    assert len(set(peaks)) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("from_step", [0, 4])
def test_compiled_code_does_not_meet_the_mode(from_step: int, followed: list[bool]) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def train(decisions: list[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = _Model(lambda model, x: part(torch.tanh(model.first(x)).exp()))
        part: Any = _part
        x, found = torch.randn(ROWS, WIDTH), []
        with apply_decisions(model, decisions):
            for i in range(7):
                if i == from_step:
                    part = torch.compile(_part, backend=backend)
                model(x).backward()
                assert model.first.weight.grad is not None
                found.append(model.first.weight.grad.clone())
        return found

    plain = train([])
    torch._dynamo.reset()
    assert all(map(equal_values, plain, train([Rebuild(path="")])))
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_what_dynamo_leaves_alone_is_no_compiled_code(followed: list[bool]) -> None:
    torch.compile(_part)  # never called: libraries do so where they are imported
    alone: Any = torch._dynamo.disable(_part)
    model, x = _Model(lambda model, x: alone(torch.tanh(model.first(x)).exp())), torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(5):
            model(x).backward()
    assert followed == [True] * 4
    torch._dynamo.reset()


def _part(x: Tensor) -> Tensor:
    return torch.tanh(x * 2).sin()
