"""Evaluation and generation under a plan: the same results, nothing twice, no extra calls."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.cost.model import FlopsCost
from recoup.ir.decision import Recompute, Rederive
from recoup.runtime.apply import apply_decisions, plain
from tests.models import Stack, make


class Ops(TorchDispatchMode):
    """Counts every op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _count(run: Any) -> tuple[Counter[str], Any]:
    torch.manual_seed(0)
    with Ops() as ops:
        result = run()
    return ops.counts, result


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "75%"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_same_ops_and_results_as_plain(kind: str, budget: str) -> None:
    model, batch, _ = make(kind)
    plan = recoup.plan(model, batch, budget=budget, cost=FlopsCost())
    assert plan.decisions
    prompt = batch["input_ids"][:, :8]

    def evaluate() -> Any:
        with torch.no_grad():
            return model(**batch).logits

    def generate() -> Any:
        return model.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, pad_token_id=0
        )

    with recoup.apply(model, plan):
        for mode in (True, False):
            model.train(mode)
            for run in (evaluate, generate):
                found, result = _count(run)
                with plain(model):
                    expected, expected_result = _count(run)
                assert found == expected  # every op, the key-value cache's too: `use_cache` is as the user left it
                assert torch.equal(result, expected_result)
    assert model.config.use_cache is True  # type: ignore[union-attr]


def test_a_patched_call_is_two_more_on_the_host() -> None:
    model = Stack().eval()
    x = torch.randn(2, 32)
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    def run() -> int:
        nonlocal num_calls
        num_calls = 0
        with torch.no_grad():
            model(x)
            sys.setprofile(count)
            try:
                model(x)
            finally:
                sys.setprofile(None)
        return num_calls

    expected = run()
    decisions = [Rederive(path="")]
    decisions += [Recompute(path=f"layers.{i}", inside="rederive") for i in range(4)]
    with apply_decisions(model, decisions):
        assert run() <= expected + 2 * len(decisions)
