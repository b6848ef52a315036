"""Spans of calls, where a module is called more than once in a step."""

from __future__ import annotations

import collections
import queue
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from recoup.ir.decision import Decision, Recompute
from recoup.runtime.apply import apply_decisions
from recoup.runtime.recompute.scope import scope

_runs: queue.SimpleQueue[_Counting] = queue.SimpleQueue()  # no state that a replay puts back


class _Counting(nn.Conv2d):
    """A convolution that counts how often it runs, in replays too."""

    def _conv_forward(self, *args: torch.Tensor | None) -> torch.Tensor:
        _runs.put(self)
        return super()._conv_forward(*args)  # type: ignore[arg-type]


class _Chain(nn.Module):
    """Calls its children in the order given; some more than once."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order = order
        for name in "abcd":
            self.add_module(name, _Counting(4, 4, 3, padding=1))
        self.norm = nn.GroupNorm(2, 4)
        self.pool = nn.AvgPool2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x.square().mean()


def _compare(order: Sequence[str], plan: Sequence[Decision], frozen: Sequence[str] = ()) -> dict[str, int]:
    """Checks that gradients are equal with the plan; returns how often each convolution ran under it."""
    torch.manual_seed(0)
    model, x = _Chain(order), torch.randn(2, 4, 16, 16)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    model(x).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    convolutions = {n: m for n, m in model.named_children() if isinstance(m, _Counting)}
    while not _runs.empty():
        _runs.get()
    with apply_decisions(model, plan):
        model(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or (parameter.grad is not None and torch.equal(parameter.grad, gradient))
    counted = collections.Counter(_runs.get() for _ in range(_runs.qsize()))
    return {name: counted[module] for name, module in convolutions.items()}


def _span(*paths: str, call: int | None = None) -> Decision:
    return Recompute(path=paths[0], call=call, span=paths[1:])


@pytest.mark.parametrize("nested", [False, True])
def test_a_module_called_twice_in_a_span(nested: bool) -> None:
    plan = [_span("a", "pool", "b", "pool", "c"), *([_span("a", "pool", "b")] if nested else [])]
    runs = _compare(["a", "pool", "b", "pool", "c", "d"], plan)
    assert runs == {"a": 3 if nested else 2, "b": 3 if nested else 2, "c": 2, "d": 1}


def test_a_span_that_begins_with_a_second_call() -> None:
    runs = _compare(["a", "pool", "b", "pool", "norm", "c", "d"], [_span("pool", "norm", "c", call=1)])
    assert runs == {"a": 1, "b": 1, "c": 2, "d": 1}


def test_a_member_called_elsewhere_is_no_region_there() -> None:
    runs = _compare(["a", "norm", "relu", "b", "relu", "c", "d"], [_span("a", "norm", "relu", "b")])
    assert runs == {"a": 2, "b": 2, "c": 1, "d": 1}  # the second ReLU works in place: alone it could be no region


def test_one_span_after_another_over_the_same_modules() -> None:
    order = ["a", "pool", "b", "pool", "a", "pool", "b"]
    runs = _compare(order, [_span("a", "pool", "b", call=0)])
    assert runs == {"a": 3, "b": 3, "c": 0, "d": 0}


def test_a_span_goes_on_behind_calls_that_are_frozen() -> None:
    """They save nothing, so no graph needs the span yet."""
    assert _compare("abcd", [_span("a", "b", "c")]) == dict.fromkeys("abc", 2) | {"d": 1}
    assert _compare("abcd", [_span("a", "b", "c")], frozen="a") == dict.fromkeys("abc", 2) | {"d": 1}
    assert _compare("abcd", [_span("a", "b", "c")], frozen="ab") == dict.fromkeys("abc", 2) | {"d": 1}
    assert not scope._unsaved
