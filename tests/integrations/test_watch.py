"""The guard: a larger batch is weighed before it runs; out of memory is explained."""

from __future__ import annotations

import pytest
import torch

import recoup
from recoup.errors import BatchTooLarge, StepOutOfMemory
from tests.models import Stack, make, step


def _batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 32)


def test_a_batch_that_fits_changes_nothing() -> None:
    model, batch, _ = make("gpt2")
    expected = step(make("gpt2")[0], batch)
    with recoup.watch(model, budget="1GiB"):
        found = step(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not model._forward_pre_hooks


def test_a_larger_batch_is_noticed_before_it_runs() -> None:
    model = Stack()
    fit = recoup.fit(model, _batch(64), budget="70%", timed=False)
    ran = []
    model.head.register_forward_hook(lambda *a: ran.append(1))
    with recoup.watch(model, budget=fit.plan.budget_bytes) as steps:
        model(_batch(64)).backward()
        model(_batch(32)).backward()  # smaller: known to fit
        model(_batch(64)).backward()
        assert steps.num_steps == 3 and [b.count for b in steps.batches.values()] == [2, 1]
        assert 0 < steps.peak_bytes <= fit.plan.budget_bytes
        assert "[64, 32]" in str(steps) and "3 steps watched" in repr(steps) and "<svg" not in steps._repr_html_()
        ran.clear()
        with pytest.raises(BatchTooLarge, match=r"A batch of \[256, 32\] would peak at .* the budget is") as caught:
            model(_batch(256))
    assert "It was not run" in str(caught.value)
    assert "recoup.fit" in str(caught.value)
    fit.applied.remove()


def test_the_plan_that_would_fit_is_named() -> None:
    model = Stack()
    plain = recoup.profile(model, _batch(256)).peak_bytes
    with recoup.watch(model, budget=int(plain * 0.8)), pytest.raises(BatchTooLarge, match=r"A plan fits: recoup\.fit"):
        model(_batch(256))
    fit = recoup.fit(model, _batch(256), budget=int(plain * 0.8), timed=False)  # as advised
    with recoup.watch(model, budget=int(plain * 0.8)):
        model(_batch(256)).backward()
    fit.applied.remove()


def test_out_of_memory_says_what_held_it() -> None:
    model = Stack()

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.head.register_forward_hook(fail)
    with (
        pytest.raises(StepOutOfMemory, match="Saved for backward, by module: `layers"),
        recoup.watch(model, budget="1GiB"),
    ):
        model.head._forward_hooks.clear()
        model(_batch(64))  # weighed while nothing fails
        model.head.register_forward_hook(fail)
        try:
            model(_batch(64))
        finally:
            model.head._forward_hooks.clear()


def test_other_errors_pass_through() -> None:
    model = Stack()
    with pytest.raises(RuntimeError, match="normalized_shape") as caught, recoup.watch(model, budget="1GiB"):
        model.eval()
        model(torch.randn(2, 7))
    assert not isinstance(caught.value, StepOutOfMemory)
    assert not model._forward_pre_hooks
