"""What autograd and torch.func do to a model with a plan in place is what they do to the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.ir.decision import Recompute, Rederive
from recoup.runtime.apply import apply_decisions

# torch's own: func and export still go through torch.jit.script; Dynamo looks at `.grad` of what it is handed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


def _net() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6))  # noqa: E731
    return nn.Sequential(block(), block(), nn.Linear(6, 2)).double()


PLANS = {
    "regions": [Recompute(path="0"), Recompute(path="1")],
    "nested": [Recompute(path=""), Recompute(path="1", inside="rederive")],
    "span": [Recompute(path="0", span=("1",), inside="rederive")],
    "rederive": [Rederive(path="")],
}


def _input() -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()


def _double_backward(net: nn.Module) -> Any:
    x = _input()
    (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    g.square().sum().backward()
    return [g, x.grad, *(p.grad for p in net.parameters())]


def _third_order(net: nn.Module) -> Any:
    x = _input()
    y = net(x).square().sum()
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.square().sum()
    return [y]


def _retained(net: nn.Module) -> Any:
    loss = net(_input()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in net.parameters()]


def _several_losses(net: nn.Module) -> Any:
    out = net(_input())
    out[0].sum().backward(retain_graph=True)
    out[1].square().sum().backward()
    return [p.grad for p in net.parameters()]


def _some_inputs(net: nn.Module) -> Any:
    x = _input()
    weight = net[1][0].weight
    return torch.autograd.grad(net(x).sum(), [weight, x])


def _two_forwards_one_backward(net: nn.Module) -> Any:
    x = _input()
    (net(x).sum() * net(x * 2).square().sum()).backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def _accumulated(net: nn.Module) -> Any:
    for i in range(3):
        net(_input() * i).square().sum().backward()
    return [p.grad for p in net.parameters()]


def _jacobian(net: nn.Module) -> Any:
    return [torch.autograd.functional.jacobian(net, _input())]


def _functional(net: nn.Module) -> Any:
    parameters = dict(net.named_parameters())

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, p, (x,)).square().sum()

    x = _input().detach()
    grads = torch.func.grad(loss)(parameters, x)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return [*grads.values(), *per_sample.values(), torch.func.jacrev(net)(x), torch.func.jvp(net, (x,), (x,))[1]]


def _forward_mode(net: nn.Module) -> Any:
    x = _input().detach()
    with torch.autograd.forward_ad.dual_level():
        out = net(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return list(torch.autograd.forward_ad.unpack_dual(out))


def _hooks_on_tensors(net: nn.Module) -> Any:
    seen = []
    handle = net[0][0].weight.register_hook(lambda g: seen.append(g) or g * 2)
    net[1].register_full_backward_hook(lambda m, gi, go: seen.extend([*gi, *go]))
    net(_input()).square().sum().backward()
    handle.remove()
    return [*seen, *(p.grad for p in net.parameters())]


WAYS: list[Callable[[nn.Module], Any]] = [
    _double_backward,
    _third_order,
    _retained,
    _several_losses,
    _some_inputs,
    _two_forwards_one_backward,
    _accumulated,
    _jacobian,
    _functional,
    _forward_mode,
    _hooks_on_tensors,
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__.strip("_"))
def test_same_as_plain(way: Callable[[nn.Module], Any], plan: str) -> None:
    expected = way(_net())
    net = _net()
    with apply_decisions(net, PLANS[plan]):
        found = way(net)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_gradcheck(plan: str) -> None:
    net = _net()
    with apply_decisions(net, PLANS[plan]):
        assert torch.autograd.gradcheck(net, _input())
        assert torch.autograd.gradgradcheck(net, _input())


@pytest.mark.parametrize("plan", PLANS)
def test_export_and_fx_see_the_plain_model(plan: str) -> None:
    net, x = _net(), _input().detach()

    def ops(model: nn.Module) -> list[str]:
        return [str(n.target) for n in torch.export.export(model, (x,)).graph.nodes]

    def traced(model: nn.Module) -> list[str]:
        return [str(n.target) for n in torch.fx.symbolic_trace(model).graph.nodes]

    expected = ops(net), traced(net)
    twin = copy.deepcopy(net)
    applied = apply_decisions(twin, PLANS[plan])
    assert (ops(twin), traced(twin)) == expected
    applied.remove()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["regions", "nested"])
def test_compiled_regions(plan: str) -> None:
    expected = _accumulated(_net())
    net = _net()
    with apply_decisions(net, PLANS[plan]):
        found = _accumulated_by(net, torch.compile(net, backend="aot_eager"))
    torch._dynamo.reset()
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


def _accumulated_by(net: nn.Module, compiled: Callable[..., torch.Tensor]) -> Any:
    for i in range(3):
        compiled(_input() * i).square().sum().backward()
    return [p.grad for p in net.parameters()]


class _Inside(nn.Module):
    """Transforms of `torch.func` and `torch.cond` inside a forward, as physics-informed and energy models have them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 1)).double()
        self.last = nn.Sequential(nn.Linear(6, 80), nn.GELU(), nn.Linear(80, 2)).double()
        self.how = how

    def _of(self, x: torch.Tensor) -> torch.Tensor:
        def energy(p: torch.Tensor) -> torch.Tensor:
            return self.net(p).squeeze(-1)

        transform = torch.func
        if self.how == "grad":
            return transform.vmap(transform.grad(energy))(x)
        if self.how == "hessian":
            return transform.vmap(transform.hessian(energy))(x).sum(-1)
        if self.how == "jvp":
            return transform.jvp(self.net, (x,), (torch.ones_like(x),))[1] * x
        if self.how == "vjp":
            return transform.vjp(self.net, x)[1](torch.ones(len(x), 1, dtype=x.dtype))[0]
        if self.how == "jacrev":
            return transform.jacrev(self.net)(x).sum((1, 2))
        return transform.vmap(energy)(x)[:, None] * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self._of(torch.tanh(x)) * x))


_INSIDE = {
    "whole": [Recompute(path="")],
    "nested": [Recompute(path="", inside="rederive"), Recompute(path="net"), Recompute(path="last")],
    "rederive": [Rederive(path="")],
}


@pytest.mark.parametrize("plan", _INSIDE)
@pytest.mark.parametrize("how", ["grad", "hessian", "jvp", "vjp", "jacrev", "vmap"])
def test_transforms_inside_a_forward(how: str, plan: str) -> None:
    gradients = []
    for decisions in ([], _INSIDE[plan]):
        model, x = _Inside(how), torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with apply_decisions(model, decisions):
            model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_hooks_of_others_are_refused_by_transforms_as_ever() -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    plain = torch.autograd.graph.disable_saved_tensors_hooks
    with recoup.rederive(), hooks, pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda t: t.sin().sum())(torch.ones(3))
    assert torch.autograd.graph.disable_saved_tensors_hooks is plain


def test_what_has_no_size_yet_is_refused() -> None:
    with pytest.raises(recoup.UsageError, match=r"`0\.weight`.*no shape"):
        recoup.plan(nn.Sequential(nn.LazyLinear(4), nn.GELU()), (torch.ones(2, 3),), budget="80%")
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(recoup.UsageError, match="nested tensor"):
        recoup.fit(nn.Linear(4, 4), (nested,), budget="80%")
