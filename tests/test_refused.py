"""Every public function checks its arguments before it does anything, and says in one line what to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.selective.generate import generate_tests

_X, _OTHER = torch.randn(64, 8), nn.Linear(8, 8)


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def _fit(model: Any, **given: Any) -> Any:
    return recoup.fit(model, given.pop("batch", _X), **{"budget": "70%", "loss": _loss, **given})


def _batches(size: int) -> torch.Tensor:
    return torch.randn(size, 8)


# What is called with a model and a plan of it, and what the message says.
_REFUSED: dict[str, tuple[Any, str]] = {
    "a name": (lambda m, p: _fit("gpt2"), "torch.nn.Module; got str"),
    "a class": (lambda m, p: _fit(nn.Linear), "the class Linear: make one"),
    "layers in a list": (lambda m, p: _fit([m]), "got list"),
    "batch before model": (lambda m, p: _fit(_X, batch=m), "got Tensor"),
    "a share as a number": (lambda m, p: _fit(m, budget=0.6), "'60%'"),
    "no budget": (lambda m, p: _fit(m, budget=None), "got None"),
    "not a number": (lambda m, p: _fit(m, budget="nan%"), "positive"),
    "a loss class": (lambda m, p: _fit(m, loss=nn.MSELoss), r"loss=MSELoss\(\)"),
    "autocast in float32": (lambda m, p: _fit(m, autocast=torch.float32), "torch.bfloat16"),
    "a scaler class": (lambda m, p: _fit(m, scaler=torch.amp.GradScaler), "GradScaler, made"),
    "half a micro-batch": (lambda m, p: _fit(m, accumulate=2.5), "micro-batches"),
    "a number of actions": (lambda m, p: _fit(m, actions=3), "names of rederive"),
    "a number to keep": (lambda m, p: _fit(m, keep=3), "paths of modules"),
    "a misspelt path to keep": (lambda m, p: _fit(m, keep=["0.x"]), "no module there"),
    "bytes of the host in words": (lambda m, p: _fit(m, host_budget="lots"), "number of bytes"),
    "a backend for compiled": (lambda m, p: _fit(m, compiled="inductor"), "True or a dict"),
    "a scheduler": (
        lambda m, p: _fit(m, optimizer=torch.optim.lr_scheduler.StepLR(torch.optim.SGD(m.parameters()), 1)),
        "got StepLR",
    ),
    "a path for a plan": (lambda m, p: recoup.apply(m, "plan.json"), r"Plan.load\(path\)"),
    "a fit for a plan": (lambda m, p: recoup.verify(m, {"plan": p}, _X, loss=_loss), r"fit\.plan"),
    "a plan for another model": (lambda m, p: recoup.verify(_OTHER, p, _X, loss=_loss), "another model"),
    "an unknown transport": (lambda m, p: recoup.apply(m, p, transport="floppy"), "inline or disk"),
    "a GPU's transport": (lambda m, p: recoup.apply(m, p, transport="cuda"), "model on cpu"),
    "no transport": (lambda m, p: recoup.apply(m, p, transport=3), "prefetch"),
    "a plan for no model": (lambda m, p: recoup.apply("model", p), "got str"),
    "nothing to verify with": (lambda m, p: recoup.verify(m, p, _X, loss=_loss, optimizer="adam"), "got str"),
    "no points": (lambda m, p: recoup.frontier(m, _X, loss=_loss, num_points=0), "num_points"),
    "a batch to make batches": (lambda m, p: recoup.max_batch(m, _X, budget="1MiB", loss=_loss), "from a size"),
    "a limit of nothing": (lambda m, p: recoup.max_batch(m, _batches, budget="1MiB", limit=0), "limit"),
    "a share for the largest batch": (lambda m, p: recoup.max_batch(m, _batches, budget="60%"), "in bytes"),
    "lengths by zero": (lambda m, p: recoup.max_tokens(m, _batches, budget="1MiB", multiple_of=0), "multiple_of"),
    "a folder for a plan": (lambda m, p: recoup.Plan.load("/"), "cannot be read"),
    "a number to hold": (lambda m, p: recoup.hold(3), "takes a tensor; got int"),
    "no tiles": (lambda m, p: recoup.tiled(m, _X, num_tiles=0), "at least 1"),
    "a budget in words to compile": (lambda m, p: recoup.compile(m, budget="sixty"), "number of bytes"),
    "watching a name": (lambda m, p: recoup.watch("model", budget="1GiB").__enter__(), "got str"),
    "a strategy nobody knows": (lambda m, p: generate_tests("x.py", sizes={}, strategies=["magic"]), "Choose from"),
}


def test_what_cannot_be_used_is_refused_in_one_line_and_changes_nothing() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
    plan = recoup.plan(model, _X, loss=_loss, budget="100%", device="cpu-generic")
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    for kind, (call, message) in _REFUSED.items():
        with pytest.raises(recoup.UsageError, match=message) as caught:
            call(model, plan)
        assert "\n" not in str(caught.value), kind
        assert torch.equal(torch.get_rng_state(), random), kind
        for name, parameter in model.named_parameters():
            assert before[name][0] == id(parameter) and torch.equal(before[name][1], parameter), kind
            assert parameter.grad is None, kind
        assert not any("forward" in vars(module) for module in model.modules()), kind


@pytest.mark.parametrize("compiled", [False, True])
def test_the_advice_for_a_compiled_part_can_be_followed(compiled: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
    bare = model[1][0]
    model[1][0] = torch.compile(bare, backend="eager")
    with pytest.raises(recoup.ConflictError, match=r"`1\.0` is OptimizedModule") as caught:
        _fit(model, compiled=compiled)
    code = next(part for part in str(caught.value).split("`") if part.startswith("model."))
    eval(code, {"model": model})
    assert model[1][0] is bare
    assert _fit(model, budget="100%", timed=False).evidence.ok


def test_a_profile_has_the_peak_that_plans_have() -> None:
    model = nn.Linear(8, 8)
    plan = recoup.plan(model, _X, loss=_loss, budget="100%", device="a100-80gb")
    profile = recoup.profile(model, _X, loss=_loss, device="a100-80gb")
    assert profile.peak_bytes == plan.predicted.plain_peak_bytes == sum(size for _, size in profile.at_peak)
    assert profile.device == plan.device
    assert "a100-80gb" in profile._repr_html_() and "library" in str(profile)
