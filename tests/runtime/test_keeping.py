"""Regions that keep results of chosen ops: the same gradients, the ops not run again, everything let go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.ir.decision import Decision, Recompute
from recoup.runtime.apply import apply_decisions
from tests.collector import live_tensors, resting

WIDTH = 16
ALL = ("attention", "matmul:16x48", "matmul:16x16", "matmul:16x64", "matmul:64x16")


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0, in_place: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        hidden = self.up(x)
        hidden = hidden.relu_() if self.in_place else hidden.relu()
        return x + self.down(hidden)


def model_of(**options: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(**options) for _ in range(3)))  # type: ignore[arg-type]


def step(model: nn.Module, *, backwards: int = 1) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Returns gradients, a random number drawn after the step, and FLOPs of backward."""
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    with FlopCounterMode(display=False) as counter:
        for i in range(backwards):
            loss.backward(retain_graph=i + 1 < backwards)
    assert x.grad is not None
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, x.grad], torch.rand(1), counter.get_total_flops()


def decisions(keep: tuple[str, ...], inside: str) -> list[Decision]:
    return [Recompute(path=str(i), inside=inside, keep=keep) for i in range(3)]  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", ["save", "rederive"])
@pytest.mark.parametrize("keep", [ALL[:1], ALL[1:3], ALL, ("matmul:1x1",)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backwards", [1, 2])
def test_same_gradients(inside: str, keep: tuple[str, ...], dropout: float, backwards: int) -> None:
    model = model_of(dropout=dropout)
    expected, drawn, _ = step(model, backwards=backwards)
    with apply_decisions(model, decisions(keep, inside)):
        found, also_drawn, _ = step(model, backwards=backwards)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(drawn, also_drawn)


def test_what_is_kept_is_not_run_again() -> None:
    model = model_of()
    _, _, plain = step(model)
    flops = {}
    attentions = {}
    for keep in ((), ALL[:2], ALL):
        with apply_decisions(model, decisions(keep, "save")):
            flops[keep] = step(model)[2]
            trace = capture(StepSpec(model=model, batch=torch.randn(2, 8, WIDTH)))
        names = [trace.signatures[op.signature].name for op in trace.ops]
        attentions[keep] = sum("attention" in name and "backward" not in name for name in names)
    assert flops[()] > flops[ALL[:2]] > flops[ALL] == plain
    assert attentions == {(): 6, ALL[:2]: 3, ALL: 3}


def test_a_result_changed_in_place_is_made_again() -> None:
    model = model_of(in_place=True)
    expected, _, plain = step(model)
    with apply_decisions(model, decisions(("matmul:16x64",), "save")):
        found, _, changed = step(model)
    with apply_decisions(model, decisions((), "save")):
        _, _, everything = step(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert plain < changed == everything


def test_a_span_and_a_region_inside_one_keep_too() -> None:
    model = model_of()
    expected, _, _ = step(model)
    span = Recompute(path="0", span=("1", "2"), keep=ALL[:1])
    inner = Recompute(path="1", keep=ALL)
    with apply_decisions(model, [span, inner]):
        found, _, _ = step(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_smaller_batch_and_evaluation() -> None:
    model = model_of()
    with apply_decisions(model, decisions(ALL, "rederive")):
        x = torch.randn(1, 3, WIDTH)
        model(x).sum().backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            model(x)
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


def test_nothing_is_left_behind() -> None:
    model = model_of()
    with apply_decisions(model, decisions(ALL, "save")):
        step(model)
        with resting():
            step(model)
            before = live_tensors()
            for _ in range(3):
                step(model)
            assert live_tensors() == before
