"""State outside of the arguments, and everything else that goes wrong silently when steps are run again by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recoup.errors import ReplayError, UsageError
from recoup.recurrent import ScanReport, scan, unroll
from tests.recurrent.helpers import Gru, Lif, Spike, differing, plain

X = torch.randn(14, 4, 5, generator=torch.Generator().manual_seed(5))


class Neuron(nn.Module):
    """The hazard of the issue tracker: `self.v`, here also zeroed beforehand, as a buffer, or changed in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(5, 6)
        self.beta = nn.Parameter(torch.tensor(0.8))
        if kind == "buffer":
            self.register_buffer("v", torch.zeros(4, 6), persistent=False)
        else:
            self.v: Any = {"none": None, "float": 0.0}.get(kind, torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = self.linear(x)
        if self.kind == "in place":
            self.v = self.v.clone()
            self.v.mul_(self.beta).add_(current)
        else:
            self.v = current if self.v is None else self.beta * self.v + current
        spikes = Spike.apply(self.v - 0.5)
        self.v = self.v - spikes * 0.5
        return spikes + 0.1 * self.v


@pytest.mark.parametrize("kind", ["none", "float", "zeroed", "buffer", "in place"])
@pytest.mark.parametrize("options", [{"chunk": 1}, {"chunk": 14}, {"slots": 3}], ids=str)
def test_attribute_state(kind: str, options: dict[str, Any]) -> None:
    def train(run: Any) -> list[Any]:
        torch.manual_seed(0)
        neuron = Neuron(kind)
        ys = run(neuron, X)
        (ys.square().sum() + neuron.v.sum()).backward()
        end = neuron.v.detach().clone()
        neuron.v = neuron.v.detach()  # truncated: the next window goes on from here
        run(neuron, X).sum().backward()
        return [ys.detach(), end, *(p.grad for p in neuron.parameters()), neuron.v.detach()]

    expected = train(lambda neuron, x: torch.stack([neuron(x_t) for x_t in x]))
    assert differing(expected, train(lambda neuron, x: unroll(neuron, x, **options))) == []


def test_attribute_state_carries_its_graph_from_scan_to_scan() -> None:
    def train(run: Any) -> list[Any]:
        torch.manual_seed(0)
        neuron = Neuron("zeroed")
        run(neuron, X[:6])
        run(neuron, X[6:]).sum().backward()
        return [neuron.v.detach(), *(p.grad for p in neuron.parameters())]

    expected = train(lambda neuron, x: torch.stack([neuron(x_t) for x_t in x]))
    found = train(lambda neuron, x: unroll(neuron, x, chunk=2))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, found, strict=True))


def test_an_attribute_left_over_from_before_has_no_edge_to_the_loop() -> None:
    class Explicit(nn.Module):
        """Handed its state, and leaves it in an attribute that nobody reads."""

        def __init__(self) -> None:
            super().__init__()
            self.lin, self.left = nn.Linear(3, 3), torch.zeros(2, 3)

        def step(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.left = h * 2
            h = torch.tanh(self.lin(x) + h)
            return h, h

    network, x = Explicit(), torch.randn(6, 2, 3)
    for _ in range(2):  # the second time `left` holds a graph whose values are gone
        scan(network.step, x, torch.zeros(2, 3), outputs="sum")[1].sum().backward()
    assert network.left.requires_grad


def test_state_in_a_closure_and_random_streams() -> None:
    generator = torch.Generator()

    def train(scanned: bool) -> list[Any]:
        torch.manual_seed(0)
        generator.manual_seed(4)
        linear, v = nn.Linear(5, 5), torch.zeros(4, 5)

        def step(state: Any, x: torch.Tensor) -> Any:
            nonlocal v
            v = 0.5 * v + linear(x) * torch.rand(5) * torch.rand(5, generator=generator)
            return state, torch.tanh(v)

        ys = scan(step, X, None, slots=2)[1] if scanned else plain(step, X, None)[1]
        ys.square().sum().backward()
        return [ys.detach(), v.detach(), *(p.grad for p in linear.parameters()), generator.get_state()]

    assert differing(train(False), train(True)) == []


def test_captured_tensors_are_found() -> None:
    def train(scanned: bool) -> list[Any]:
        torch.manual_seed(0)
        raw = torch.randn(5, 5, requires_grad=True)
        w = torch.sin(raw)  # not a leaf: the outer graph goes on below it
        step = lambda h, x: (torch.tanh(h @ w + x), h @ w)  # noqa: E731
        h = torch.zeros(4, 5)
        last, ys = scan(step, X, h, slots=3) if scanned else plain(step, X, h)
        (ys.sum() + last.sum()).backward()
        return [raw.grad]

    assert differing(train(False), train(True)) == []


def test_a_module_for_every_step() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(len(X)))
    step = lambda h, x: (torch.tanh(layers[int(x)](h)), None)  # noqa: E731
    h = X[0].clone()
    times = torch.arange(len(X))
    scan(step, times, h, slots=2, outputs="none")[0].sum().backward()
    found = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    state = h
    for t in times:
        state, _ = step(state, t)
    state.sum().backward()
    assert differing([p.grad for p in layers.parameters()], found) == []


def test_hooks_on_parameters_run_once() -> None:
    network = Gru()
    calls: list[int] = []
    for p in network.parameters():
        p.register_hook(lambda g: calls.append(1) or g * 2)  # type: ignore[func-returns-value]
    scan(network.step, X, torch.zeros(4, 7), chunk=3)[1].sum().backward()
    assert len(calls) == len(list(network.parameters()))


def test_retained_graph_runs_again() -> None:
    network = Gru()
    ys = scan(network.step, X, torch.zeros(4, 7), slots=3)[1]
    ys.sum().backward(retain_graph=True)
    once = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    ys.sum().backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(network.parameters(), once, strict=True))  # type: ignore


def test_nests_without_grad_and_nothing_to_train() -> None:
    step = lambda s, x: ({"h": s["h"] * 0.5 + x["a"]}, (s["h"], None))  # noqa: E731
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            state, (ys, nothing) = scan(step, {"a": X}, {"h": X[0]})
            assert nothing is None and ys.shape == X.shape and not state["h"].requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 2, "chunk": 3}, "slots and chunk"),
        ({"slots": 0}, "slots"),
        ({"chunk": 1.5}, "chunk"),
        ({"budget": "many"}, "many"),
        ({"budget": "auto"}, "'auto' is not for a loop"),
        ({"budget": "min"}, "'min' is not for a loop"),
        ({"outputs": "best"}, "outputs"),
        ({"length": 3}, "length=3"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scan(Gru().step, X, torch.zeros(4, 7), **options)


def test_what_cannot_be_right_is_refused_by_name() -> None:
    network = Gru()
    ys = scan(network.step, X, torch.zeros(4, 7), chunk=2)[1]
    with pytest.raises(UsageError, match="double backward"):
        torch.autograd.grad(ys.sum(), list(network.parameters()), create_graph=True)
    with pytest.raises(UsageError, match="pair"):
        scan(lambda s, x: s, X, torch.zeros(4, 7))
    seen: list[torch.Tensor] = []

    def collecting(state: Any, x: torch.Tensor) -> Any:
        seen.append(network.cell(x))
        return state, x

    with pytest.raises(UsageError, match=r"`seen` collects"):
        scan(collecting, X, None)
    x = X.clone()
    ys = scan(network.step, x, torch.zeros(4, 7), chunk=2)[1]
    x.zero_()
    with pytest.raises(ReplayError, match="input 0"):
        ys.sum().backward()


@pytest.mark.slow
def test_long_loop_in_little_memory() -> None:
    network = Lif(4)
    report = ScanReport()
    x = torch.randn(3000, 1, 5)
    state, y = scan(network.step, x, (torch.zeros(1, 4), torch.zeros(1, 3)), slots=12, outputs="mean", report=report)
    (y.sum() + state[0].sum()).backward()
    assert report.evaluations == report.predicted_evaluations
    assert network.first.weight.grad is not None


@pytest.mark.parametrize("share", range(25, 100, 10))
def test_statistics_in_many_budgets(share: int) -> None:
    """The first steps are measured with copies of the state; statistics changed in place are no copies."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.v = nn.BatchNorm1d(32), nn.Linear(5, 32), torch.zeros(4, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.v = torch.tanh(self.norm(self.linear(x)) + 0.5 * self.v)
            return self.v * 2

    def train(run: Any) -> list[Any]:
        torch.manual_seed(0)
        module = Normed()
        buffers = list(module.buffers())
        ys = run(module, torch.cat([X] * 3))
        (ys.sum() + module.v.sum()).backward()
        assert all(a is b for a, b in zip(buffers, module.buffers(), strict=True))
        return [ys.detach(), *buffers, *(p.grad for p in module.parameters()), module.v.detach()]

    expected = train(lambda module, x: torch.stack([module(x_t) for x_t in x]))
    assert differing(expected, train(lambda module, x: unroll(module, x, budget=f"{share}%"))) == []
