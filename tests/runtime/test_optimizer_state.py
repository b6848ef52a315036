"""The optimizer's state on the host between steps: equal bits, the user's own object, few bytes on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import UsageError
from recoup.runtime.offload.optimizer_state import FileHost, offload_optimizer

WIDTH = 256  # a weight's moment has just the bytes that are worth a copy


class CountingHost(FileHost):
    """Counts what is on the device at a time, and what moved."""

    def __init__(self) -> None:
        self.bytes_out = self.bytes_back = self.now = self.most = self.num_there = 0

    def leave(self, tensor: torch.Tensor, there: Any | None) -> Any:
        self.num_there += there is None
        self.bytes_out += tensor.nbytes
        self.now -= tensor.nbytes if there is not None else 0
        return super().leave(tensor, there)

    def back(self, there: Any, device: torch.device) -> torch.Tensor:
        self.bytes_back += there.nbytes
        self.now += there.nbytes
        self.most = max(self.most, self.now)
        return super().back(there, device)


def make_model(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights, "lr": 1e-2}, {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 3e-2}]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, seed: int = 0, closure: bool = False
) -> None:
    torch.manual_seed(seed)
    for number in range(steps):
        x = torch.randn(4, WIDTH)

        def loss_after_backward(x: torch.Tensor = x, number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) if number % 3 else model[:2](x)).square().mean()  # the last layer has no gradient at times
            loss.backward()
            return loss

        if closure:
            assert optimizer.step(loss_after_backward) is not None
        else:
            loss_after_backward()
            optimizer.step()


def same(a: Any, b: Any) -> bool:
    """Whether two nests of tensors have the same bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, maximize=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": lambda p: torch.optim.NAdam(p, foreach=True),
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_the_optimizer_alone(name: str) -> None:
    plain, moved = make_model(), make_model()
    optimizers = [OPTIMIZERS[name](groups(m)) for m in (plain, moved)]
    train(plain, optimizers[0], 2)
    train(moved, optimizers[1], 1)  # some of the state is there when it begins
    torch.manual_seed(0)
    torch.randn(4, WIDTH)
    host = CountingHost()
    with offload_optimizer(optimizers[1], host=host) as offload:
        for number in (1, 2, 3):
            torch.manual_seed(number)
            x = torch.randn(4, WIDTH)
            for model, optimizer in zip((plain, moved), optimizers, strict=True):
                if number == 1 and model is plain:
                    model.load_state_dict(moved.state_dict())
                    optimizer.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
                optimizer.zero_grad()
                (model(x) if number % 2 else model[:2](x)).square().mean().backward()
                optimizer.step()
        assert same(list(plain.parameters()), list(moved.parameters()))
        assert same(optimizers[0].state_dict(), optimizers[1].state_dict())
        if name != "adafactor":  # whose state is rows and columns
            assert offload.host_bytes >= 3 * WIDTH * WIDTH * 4
            assert offload.moves.bytes_back == host.bytes_back > 0
            per_weight = offload.host_bytes // 3
            assert host.most == per_weight, "one weight's state at a time"
            assert host.num_there * WIDTH * WIDTH * 4 == offload.host_bytes, "the host's memory is used again"
    assert "step" not in vars(optimizers[1])
    assert not optimizers[1]._optimizer_load_state_dict_post_hooks and not optimizers[1]._optimizer_step_pre_hooks
    assert same(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_hooks_schedulers_closures_and_scalers_see_one_step() -> None:
    found = []
    for is_moved in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(groups(model))
        first = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        offload = offload_optimizer(optimizer) if is_moved else None
        second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen: list[Any] = []
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda o, args, kwargs: seen.append([len(g["params"]) for g in o.param_groups]))
        train(model, optimizer, 2, closure=True)
        first.step(), second.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for value in (1.0, float("inf"), 2.0):  # the second step is left out
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, WIDTH), value)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        if offload is not None:
            offload.remove()
        train(model, optimizer, 1)
        found.append((seen, first.get_last_lr(), list(model.parameters()), optimizer.state_dict()))
        assert not is_moved or offload.host_bytes == 0
    assert same(found[0], found[1])


def test_state_dicts_are_saved_and_loaded(tmp_path: Any) -> None:
    plain, moved = make_model(), make_model()
    first, second = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(moved.parameters())
    train(plain, first, 2)
    with offload_optimizer(second) as offload:
        train(moved, second, 2)
        torch.save(second.state_dict(), tmp_path / "state.pt")
        held = second.state_dict()["state"][0]["exp_avg"]
        train(moved, second, 1)
        assert same(held, second.state_dict()["state"][0]["exp_avg"]), "it is updated in place, as without offload"
        second.load_state_dict(torch.load(tmp_path / "state.pt"))
        moved.load_state_dict(plain.state_dict())
        assert same(first.state_dict(), second.state_dict())
        assert offload.host_bytes == 3 * 2 * WIDTH * WIDTH * 4
        train(plain, first, 1, seed=5)
        train(moved, second, 1, seed=5)
        assert same(first.state_dict(), second.state_dict())
        assert not same(held, second.state_dict()["state"][0]["exp_avg"])


class Own(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "runs the training step again"),
        (lambda p: Own(p), "Own.step is code of tests.runtime.test_optimizer_state"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.AdamW, "takes a torch.optim.Optimizer; got type"),
    ],
)
def test_what_cannot_be_served_is_refused(make: Any, words: str) -> None:
    optimizer = make(list(make_model(1).parameters()))
    before = set(vars(optimizer))
    with pytest.raises(UsageError, match=words):
        offload_optimizer(optimizer)
    assert set(vars(optimizer)) == before


def test_a_step_that_fails_leaves_the_groups_and_the_state_whole() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(groups(model))
    with offload_optimizer(optimizer) as offload:
        train(model, optimizer, 2)
        before = offload.host_bytes
        lists = [g["params"] for g in optimizer.param_groups]
        model[1].weight.grad = torch.zeros(WIDTH, WIDTH).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        assert all(g["params"] is given for g, given in zip(optimizer.param_groups, lists, strict=True))
        assert offload.host_bytes == before
        with pytest.raises(UsageError, match="already"):
            offload_optimizer(optimizer)
        train(model, optimizer, 1)


def test_plans_count_the_state_on_the_host_and_hold() -> None:
    model = make_model(6)
    batch = (torch.randn(512, WIDTH),)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    state_bytes = 6 * 2 * WIDTH * WIDTH * 4
    step = {"loss": lambda out, _: out.square().mean(), "optimizer": optimizer}
    there = recoup.plan(model, batch, budget="100%", **step)
    with offload_optimizer(optimizer) as offload:
        away = recoup.plan(model, batch, budget="100%", **step)
        assert not vars(optimizer)["state"], "nothing of the user's was stepped"
        assert away.predicted.host_bytes == state_bytes
        saved = there.predicted.peak_bytes - away.predicted.peak_bytes
        assert 0 < saved <= state_bytes
        assert away.predicted.optimizer_bytes + state_bytes == there.predicted.optimizer_bytes
        with pytest.raises(UsageError, match=r"state alone takes 3\.0 MiB on the host"):
            recoup.plan(model, batch, budget="100%", host_budget=state_bytes - 1, **step)
        fitted = recoup.fit(model, batch, budget="90%", host_budget="1GiB", **step)
        assert fitted.evidence.within_budget and fitted.plan.predicted.host_bytes >= state_bytes
        assert abs(fitted.evidence.peak_bytes / fitted.plan.predicted.peak_bytes - 1) < 0.01
        model(*batch).square().mean().backward()
        optimizer.step()
        assert offload.host_bytes == state_bytes
        fitted.applied.remove()
