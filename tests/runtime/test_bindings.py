"""Parameters that are not the module's own at the replay: those of the forward, bit for bit, or a true refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import recoup
from recoup.ir.decision import Decision, Recompute, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.recompute import frame, spot_check

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _net(block: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(3)))


def _square() -> nn.Module:
    """As many rows in the batch as the weights have: only what they are tells an activation from a weight."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


PLANS: dict[str, list[Decision]] = {
    "regions": [Recompute(path=str(i)) for i in (1, 2, 3)],
    "nested": [Recompute(path=""), Recompute(path="2", inside="rederive")],
    "span": [Recompute(path="1", span=("2", "3"), inside="rederive")],
    "rederive": [Rederive(path="")],
}


def _input() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))


def _results(net: nn.Module, *more: torch.Tensor) -> list[torch.Tensor]:
    return [t.grad for t in [*net.parameters(), *more] if t.grad is not None]


def _first_order_maml(net: nn.Module) -> list[torch.Tensor]:
    names = dict(net.named_parameters())
    for _ in range(2):
        grads = torch.autograd.grad(functional_call(net, names, (_input(),)).square().mean(), list(names.values()))
        names = {k: p - 1e-3 * g for (k, p), g in zip(names.items(), grads, strict=True)}
    (functional_call(net, names, (_input().flip(0),)) - 1).square().mean().backward()
    return _results(net)


def _second_order_maml(net: nn.Module) -> list[torch.Tensor]:
    names = dict(net.named_parameters())
    loss = functional_call(net, names, (_input(),)).square().mean()
    grads = torch.autograd.grad(loss, list(names.values()), create_graph=True)
    fast = {k: p - 0.1 * g for (k, p), g in zip(names.items(), grads, strict=True)}
    (functional_call(net, fast, (_input().flip(0),)) - 1).square().mean().backward()
    return _results(net)


def _bayesian(net: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    for eps in (1e-4, 1e-2):
        noise = {k: torch.randn(p.shape, generator=generator) for k, p in net.named_parameters()}
        drawn = {k: p * (1 + eps * noise[k]) for k, p in net.named_parameters()}
        functional_call(net, drawn, (_input(),)).square().mean().backward()
    return _results(net)


def _hypernetwork(net: nn.Module) -> list[torch.Tensor]:
    """All weights are slices of one vector that another network makes."""
    torch.manual_seed(3)
    num = sum(p.numel() for p in net.parameters())
    hyper = nn.Linear(4, num)
    flat, offset, names = hyper(torch.ones(4)) * 0.3, 0, {}
    for k, p in net.named_parameters():
        names[k] = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    functional_call(net, names, (_input(),)).square().mean().backward()
    return _results(net, *hyper.parameters())


def _two_sets_before_backward(net: nn.Module) -> list[torch.Tensor]:
    names = dict(net.named_parameters())
    near = {k: p.detach().clone().add_(1e-4).requires_grad_() for k, p in names.items()}
    losses = [functional_call(net, n, (_input(),)).square().mean() for n in (names, near, names)]
    (losses[0] * losses[1] + losses[2]).backward()
    return _results(net, *near.values())


def _frozen_for_the_forward(net: nn.Module) -> list[torch.Tensor]:
    x = _input().requires_grad_()
    net.requires_grad_(False)
    loss = (net(x) - 1).square().mean()
    net.requires_grad_(True)
    loss.backward()
    assert all(p.requires_grad for p in net.parameters())
    return _results(net, x)


def _frozen_after_the_forward(net: nn.Module) -> list[torch.Tensor]:
    x = _input().requires_grad_()
    loss = (net(x) - 1).square().mean()
    net.requires_grad_(False)
    loss.backward()
    assert not any(p.requires_grad for p in net.parameters())
    return _results(net, x)


def _some_thawed(net: nn.Module) -> list[torch.Tensor]:
    x = _input().requires_grad_()
    for i, p in enumerate(net.parameters()):
        p.requires_grad_(i % 3 == 0)
    loss = (net(x) - 1).square().mean()
    for i, p in enumerate(net.parameters()):
        p.requires_grad_(i % 2 == 0)
    loss.backward()
    return _results(net, x)


def _bound_anew(net: nn.Module) -> list[torch.Tensor]:
    """An averaged copy is put in for evaluation between forward and backward."""
    loss = net(_input()).square().mean()
    own = [(m, k, p) for m in net.modules() for k, p in m._parameters.items() if p is not None]
    for m, k, p in own:
        setattr(m, k, nn.Parameter(p.detach() * 0.5))
    found = [m._parameters[k] for m, k, _ in own]
    loss.backward()
    assert all(m._parameters[k] is f for (m, k, _), f in zip(own, found, strict=True))
    return [p.grad for _, _, p in own if p.grad is not None]


def _a_child_replaced(net: nn.Module) -> list[torch.Tensor]:
    loss = net(_input()).square().mean()
    name, old = next((n, m) for n, m in net[2].named_children())
    new = nn.Linear(WIDTH, WIDTH)
    setattr(net[2], name, new)
    loss.backward()
    assert getattr(net[2], name) is new
    return _results(net, *old.parameters())


def _weight_norm(net: nn.Module) -> list[torch.Tensor]:
    for m in list(net.modules()):
        if isinstance(m, nn.Linear):
            parametrizations.weight_norm(m)
    for m in net.modules():
        m._forward_pre_hooks.clear()
    with parametrize.cached():
        loss = net(_input()).square().mean() + net(_input() * 2).square().mean()
    loss.backward()
    return _results(net)


def _cached_around_backward(net: nn.Module) -> list[torch.Tensor]:
    parametrizations.orthogonal(net[0])
    parametrizations.spectral_norm(next(m for m in net[1].modules() if isinstance(m, nn.Linear)))
    loss = net(_input()).square().mean()
    with parametrize.cached():
        loss.backward()
    return _results(net)


WAYS = [
    _first_order_maml,
    _second_order_maml,
    _bayesian,
    _hypernetwork,
    _two_sets_before_backward,
    _frozen_for_the_forward,
    _frozen_after_the_forward,
    _some_thawed,
    _bound_anew,
    _a_child_replaced,
    _weight_norm,
    _cached_around_backward,
]


@pytest.mark.parametrize("block", [Block, _square])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_weights_of_the_forward(
    way: Callable[[nn.Module], list[torch.Tensor]], plan: str, block: Callable[[], nn.Module]
) -> None:
    expected = way(_net(block))
    net = _net(block)
    with apply_decisions(net, PLANS[plan]):
        found = way(net)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _given_new_data(net: nn.Module) -> None:
    for p in net.parameters():
        p.data = p.data * 0.999


def _averaged(net: nn.Module) -> None:
    for p in net.parameters():
        p.data.mul_(0.999)


def _swapped_and_back(net: nn.Module) -> None:
    own = [p.data for p in net.parameters()]
    _given_new_data(net)
    for p, data in zip(net.parameters(), own, strict=True):
        p.data = data


@pytest.mark.parametrize("change", [_given_new_data, _averaged])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_changed_through_data_are_refused(change: Callable[[nn.Module], None], plan: str) -> None:
    net = _net()
    with apply_decisions(net, PLANS[plan]):
        loss = net(_input().repeat(80, 1)).square().mean()
        change(net)
        with pytest.raises(RuntimeError, match=r"\.data"):
            loss.backward()
        net.zero_grad()
        net(_input()).square().mean().backward()  # the next step is as good as ever


@pytest.mark.parametrize("plan", PLANS)
def test_weights_that_came_back_are_fine(plan: str) -> None:
    nets = _net(), _net()
    with apply_decisions(nets[1], PLANS[plan]):
        for net in nets:
            loss = net(_input()).square().mean()
            _swapped_and_back(net)
            loss.backward()
    expected, found = map(_results, nets)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class _Closed(nn.Module):
    """Its weights are nobody's parameters: nothing can be bound, so what does not match is refused."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.run: Any = lambda x: torch.tanh(x @ weights[0] @ weights[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)  # type: ignore[no-any-return]


def test_an_activation_never_fills_a_weights_slot() -> None:
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=False) for _ in range(2)]
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Closed(weights))
    with apply_decisions(net, [Recompute(path="1")]):
        loss = net(_input()).square().mean()
        for w in weights:
            w.requires_grad_(True)
        with pytest.raises(recoup.ReplayError, match="weight"):
            loss.backward()


def test_parameters_that_lie_elsewhere_since_the_last_step_are_read_there() -> None:
    net = _net()
    x = torch.randn(3, WIDTH)
    applied = apply_decisions(net, [Recompute(path="1")])
    net(x).sum().backward()
    before = [p.data for p in net.parameters()]
    for p in net.parameters():
        p.data = p.data.clone()
    net(x).sum().backward()  # what was noted of the old place is of no account
    for data in before:
        data.zero_()
    net(x).sum().backward()
    loss = net(x).sum()
    net[1].up.weight.data[0] = 2.0
    with pytest.raises(RuntimeError, match=r"1\.up\.weight|up\.weight"):
        loss.backward()
    applied.remove()


class Detached(nn.Module):
    """Saves an alias of one frozen weight, in a second forward of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(WIDTH), requires_grad=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.second if recoup.is_recomputing() else self.first).detach()


def test_where_no_bytes_are_read_another_weight_is_told_by_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: to read there would wait."""
    for module in (frame, spot_check):
        monkeypatch.setattr(module, "read_bytes", lambda tensor: b"")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached())
    with apply_decisions(model, [Recompute(path="1")]), pytest.raises(recoup.ReplayError, match="saved a weight"):
        model(torch.randn(4, WIDTH)).sum().backward()
