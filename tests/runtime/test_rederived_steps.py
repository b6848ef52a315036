"""Steps under a plan that only rederives: those that are alike follow a program, others are recorded."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from recoup import _torch
from recoup.evidence.gradients import equal_values
from recoup.ir.decision import Rederive
from recoup.runtime.apply import Applied, apply_decisions
from recoup.runtime.rebuild.rederive_steps import RederiveCalls, RederiveRun


class Block(nn.Module):
    """A pre-norm block with what a test varies.

    Attributes:
        kind: "plain", or what its forward does otherwise. seen: whether it does so now.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.kind = kind
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x))) * (1.5 if self.is_other and self.kind == "scalar" else 0.5)
        if self.is_other and self.kind == "function":
            h = torch.tanh(h)
        if self.is_other and self.kind == "in place":
            h.mul_(2)
        if self.is_other and self.kind == "data":
            h.data.mul_(0.25)
        if self.is_other and self.kind == "parameter":
            self.norm.weight.data.add_(0.125)
        if self.is_other and self.kind == "tensor":
            h = h * torch.sigmoid(h + 0)
        return x + self.down(torch.sin(h))


def train(kind: str, others: set[int], plan: bool) -> tuple[list[Tensor | str], Applied, list[int]]:
    """Returns what some steps of two blocks give, with the second one going another way in `others`."""
    torch.manual_seed(0)
    model = nn.Sequential(Block("plain"), Block(kind), nn.Linear(32, 1))
    applied = apply_decisions(model, [Rederive(path="")] if plan else [])
    found: list[Tensor | str] = []
    num_followed: list[int] = []
    for i in range(7):
        model[1].is_other = i in others
        x = torch.randn(64, 32)
        try:
            model(x).square().mean().backward()
        except RuntimeError as error:
            found.append(type(error).__name__)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        num_followed.append(applied.log.num_rederived)
    return found, applied, num_followed


def programs_of(applied: Applied) -> int:
    """Returns how many programs a plan has."""
    calls = getattr(applied._state, "rederived_calls", None)
    assert isinstance(calls, RederiveCalls)
    return len(calls._programs)


@pytest.mark.parametrize("kind", ["plain", "scalar", "function", "in place", "data", "parameter", "tensor"])
def test_a_step_that_goes_another_way_is_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []
    real = RederiveRun.__init__

    def init(self: RederiveRun, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        followed.append(True)

    monkeypatch.setattr(RederiveRun, "__init__", init)
    plain, _, _ = train(kind, {4, 6}, plan=False)
    planned, applied, num_rederived = train(kind, {4, 6}, plan=True)
    assert len(plain) == len(planned)
    for a, b in zip(plain, planned, strict=True):
        assert a == b if isinstance(a, str) or isinstance(b, str) else equal_values(a, b)
    assert followed
    assert num_rederived[3] - num_rederived[2] == num_rederived[0] > 0  # as many with a program as with a record
    if kind == "plain":
        assert len(followed) == 6
        assert programs_of(applied) == 1
        assert copy.deepcopy(applied._state).rederived_calls is not applied._state.rederived_calls  # type: ignore[union-attr]


def test_steps_of_borrowed_weights_are_others() -> None:
    """`functional_call` puts tensors in the parameters' place: nothing is rebuilt from these."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    applied = apply_decisions(model, [Rederive(path="")])

    def rederived(weights: dict[str, Tensor] | None = None) -> int:
        before = applied.log.num_rederived
        x = torch.randn(64, 32)
        (model(x) if weights is None else functional_call(model, weights, (x,))).square().mean().backward()
        return applied.log.num_rederived - before

    num = rederived()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for _ in range(4):
        assert rederived(weights) < num
    assert [rederived() for _ in range(3)] == [num] * 3


def test_steps_whose_graphs_live_side_by_side() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block("plain"), Block("plain"))
    twin = copy.deepcopy(model)
    apply_decisions(model, [Rederive(path="")])
    batches = [torch.randn(64, 32) for _ in range(6)]
    for each in (model, twin):
        for x in batches[:3]:
            each(x).sum().backward()
        losses = [each(x).square().sum() for x in batches]
        for loss in losses[::-2] + losses[::2]:
            loss.backward(retain_graph=True)
        for loss in losses:
            loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert equal_values(a.grad, b.grad)


class Entered(TorchDispatchMode):
    """Counts ops."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


class Around(nn.Module):
    """A block, with a dispatch mode of the user's around its inside in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("plain")
        self.i = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.i += 1
        x = torch.sin(x)
        if self.i % 3:
            return torch.tanh(self.block(x))
        with Entered() as mode:
            x = self.block(x)
        self.seen.append(mode.num)
        return torch.tanh(x)


def both(make: Callable[[], nn.Module], train: Callable[[nn.Module], list[Tensor]]) -> list[list[Tensor]]:
    """Returns what training gives, plain and under a plan that rederives."""
    found = []
    for decisions in ([], [Rederive(path="")]):
        torch.manual_seed(0)
        model = make()
        with apply_decisions(model, decisions):
            found.append(train(model))
            assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    return found


def gradients(model: nn.Module) -> list[Tensor]:
    """Returns a model's gradients, and takes them off."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_a_mode_of_the_users_inside_of_a_step() -> None:
    seen: list[list[int]] = []

    def train(model: nn.Module) -> list[Tensor]:
        assert isinstance(model, Around)
        found = []
        for _ in range(8):
            model(torch.randn(64, 32)).sum().backward()
            found += gradients(model)
        seen.append(model.seen)
        return found

    plain, planned = both(Around, train)
    assert all(map(equal_values, plain, planned))
    assert seen[0] == seen[1]  # it meets the ops that it meets without a plan


def halve(module: nn.Module, args: Any, out: Tensor) -> None:
    """Writes to a result in a way that no version tells of."""
    out.data.mul_(0.5)


def test_hooks_that_come_and_go_between_steps() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        found = []
        norm, up = model[0].norm, model[1].up  # type: ignore[index,union-attr]
        for i in range(12):
            handles = []
            if i in (4, 5):
                handles.append(norm.register_forward_hook(lambda m, a, out: torch.sigmoid(out)))  # type: ignore[union-attr,operator]
            if i in (7, 8):
                handles.append(up.register_forward_hook(halve))  # type: ignore[union-attr,operator]
            if i in (10, 11):
                handles.append(up.register_full_backward_hook(lambda m, a, b: (a[0] * 2,)))  # type: ignore[union-attr,operator]
            model(torch.randn(64, 32)).sum().backward()
            found += gradients(model)
            for handle in handles:
                handle.remove()
        return found

    plain, planned = both(lambda: nn.Sequential(Block("plain"), Block("plain")), train)
    assert all(map(equal_values, plain, planned))


def test_steps_of_two_threads_at_once() -> None:
    def train(model: nn.Module) -> list[Tensor]:
        found: dict[int, list[Tensor]] = {0: [], 1: []}

        def steps(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            for _ in range(8):
                x = torch.randn(64, 32, generator=generator)
                loss = model(x).square().sum()
                found[number] += torch.autograd.grad(loss, list(model.parameters()))

        threads = [threading.Thread(target=steps, args=(number,)) for number in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0] + found[1]

    plain, planned = both(lambda: nn.Sequential(Block("plain"), Block("plain")), train)
    assert len(plain) == len(planned) == 2 * 8 * 12
    assert all(map(equal_values, plain, planned))


def test_a_tensor_saved_twice_is_rebuilt_once_where_backward_asks_soon() -> None:
    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x) * 2  # saved by two products below, and what leads to it by a third
            return y.exp() * torch.tanh(y) + torch.sin(x).pow(2) * y

    def train(model: nn.Module) -> list[Tensor]:
        found = []
        for _ in range(5):
            x = torch.randn(64, 32, requires_grad=True)
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    plain, planned = both(Shared, train)
    assert all(map(equal_values, plain, planned))


def test_threads_that_ask_to_be_told_of_compiled_calls_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    monkeypatch.setattr(eval_frame, "cached_backends", {0: object()})
    before = eval_frame._maybe_set_eval_frame
    told: list[str] = []
    first = _torch.on_compiled_calls(lambda: told.append("first"))
    second = _torch.on_compiled_calls(lambda: told.append("second"))
    first.__enter__()
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    prior = eval_frame._maybe_set_eval_frame(None)
    assert not told
    eval_frame._maybe_set_eval_frame(False)  # only what is compiled already
    eval_frame._maybe_set_eval_frame(prior)
    assert set(told) == {"first"}  # it happens in this thread
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert eval_frame._maybe_set_eval_frame is before


def test_a_backward_through_a_part_of_the_graph_and_then_through_all() -> None:
    """A tensor may be asked for again while another saved tensor of its value still holds what was rebuilt for both."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(
                nn.Sequential(
                    nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1)
                )
                for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = F.relu(x + block(x))
            return x.mean((2, 3)).square().mean()

    def gradients(decisions: list[Rederive]) -> list[Tensor]:
        torch.manual_seed(0)
        model, x, found = Residual(), torch.randn(8, 3, 16, 16), []
        parameters = list(model.parameters())
        with apply_decisions(model, decisions):
            for i in range(9):
                model.zero_grad()
                loss = model(x)
                loss.backward(inputs=parameters[i % len(parameters) :], retain_graph=True)  # type: ignore[no-untyped-call]
                loss.backward()
                found += [p.grad.clone() for p in parameters if p.grad is not None]
        return found

    plain, planned = gradients([]), gradients([Rederive(path="")])
    assert len(plain) == len(planned) and all(map(torch.equal, plain, planned))
