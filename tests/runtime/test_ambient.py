"""What surrounds a forward only, or backward only: the replay runs under what the forward ran under."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recoup import _torch
from recoup.ir.decision import Decision, Recompute, Rederive
from recoup.runtime.apply import apply_decisions

SCALE = contextvars.ContextVar("SCALE", default=1.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).view(4, 64, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 64, 8)
        gain = torch.linspace(0, 1, 8).cumsum(0).to(x.dtype)
        return x + self.out(torch.tanh(h) * nn.functional.silu(h)) * SCALE.get() * gain


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


class Halved(TorchFunctionMode):
    """Changes values, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.tanh else out


class Rounded(TorchDispatchMode):
    """Simulates a coarser number format."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is not torch.ops.aten.detach.default  # autograd's own, of outputs that it saves
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor, torch.ops.aten.silu.default):
            return out.bfloat16().float()
        return out


@contextlib.contextmanager
def _variable() -> Iterator[None]:
    token = SCALE.set(0.3)
    try:
        yield
    finally:
        SCALE.reset(token)


@contextlib.contextmanager
def _global_hook() -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: out * 1.5 if isinstance(m, nn.LayerNorm) else None
    )
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def _module_hook(net: nn.Module) -> Iterator[None]:
    handles = [m.register_forward_hook(lambda m, args, out: out * 1.5) for m in net.modules() if type(m) is nn.Linear]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]] = {
    "function mode": lambda net: Halved(),
    "dispatch mode": lambda net: Rounded(),
    "variable": lambda net: _variable(),
    "math attention": lambda net: sdpa_kernel(SDPBackend.MATH),
    "global hook": lambda net: _global_hook(),
    "module hook": _module_hook,
    "default dtype": lambda net: _double_by_default(),
    "device": lambda net: torch.device("cpu"),
    "threads": lambda net: _one_thread(),
}
PLANS: dict[str, list[Decision]] = {
    "regions": [Recompute(path=str(i)) for i in range(3)],
    "nested": [Recompute(path=""), Recompute(path="1", inside="rederive")],
    "rederive": [Rederive(path="")],
}


def _step(net: nn.Module, context: contextlib.AbstractContextManager[Any], where: str) -> list[torch.Tensor]:
    x = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(1))
    with context if where == "forward" else contextlib.nullcontext():
        loss = net(x).square().mean()
    with context if where == "backward" else contextlib.nullcontext():
        loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_only_around_one_half(name: str, plan: str, where: str) -> None:
    net = _net()
    expected = _step(net, CONTEXTS[name](net), where)
    net = _net()
    with apply_decisions(net, PLANS[plan]):
        context = CONTEXTS[name](net)
        before = _torch.backend_flags(), _torch.user_modes(), _torch.global_forward_hooks()
        found = _step(net, context, where)
        assert (_torch.backend_flags(), _torch.user_modes(), _torch.global_forward_hooks()) == before
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", [Halved, Rounded])
def test_a_mode_around_the_forward_sees_the_forward_once(mode: Any) -> None:
    counts = []
    for plan in ([], PLANS["regions"]):
        net, seen = _net(), mode()
        with apply_decisions(net, plan):
            loss_of = _step(net, seen, "forward")
        assert loss_of
        counts.append(seen.calls)
    assert counts[0] == counts[1]


class _Compressed:
    """A user's own saved-tensor hooks, inside a forward: what is kept is rounded."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return torch.tanh(torch.sigmoid(x) * x) * x


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle = _Compressed(self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(self.a(x))
        with torch.autograd.graph.save_on_cpu():
            return x + self.b(nn.functional.gelu(h))


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_of_the_users_inside_a_region(plan: str) -> None:
    gradients = []
    for decisions in ([], PLANS[plan]):
        torch.manual_seed(0)
        net = nn.Sequential(*(Packed() for _ in range(3)))
        with apply_decisions(net, decisions):
            x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
            net(x).square().mean().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]
