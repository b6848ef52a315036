"""Budgets hold however a step is compiled: by blocks, dynamic shapes, autocast, dropout, accumulation, inductor."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import recoup
from recoup.capture.snapshot import untouched
from recoup.capture.step import make_objective
from recoup.cli.main import run
from recoup.compiled.fitting import CompiledFitting
from recoup.compiled.recording import CompileOptions
from recoup.errors import UsageError
from recoup.thresholds import MOST_WAYS
from tests.compiled.models import Blocks, Residual
from tests.thorough import IS_THOROUGH, thorough

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]
AOT = {"backend": "aot_eager"}


def test_a_lower_budget_never_gives_a_higher_peak() -> None:
    torch.manual_seed(0)
    model, batch = Residual(num_blocks=3), torch.randn(256, 32)
    objective, batch = make_objective(batch)
    with untouched(model, batch, objective.functions):
        fitting = CompiledFitting(model, batch, objective, None, CompileOptions.of(AOT))
        plain = fitting.record()
        peaks = []
        for share in range(100, 40, -3 if IS_THOROUGH else -6):
            try:
                done = fitting.fit(plain * share // 100, free_bytes=None, timed=False)
            except recoup.InfeasibleBudget:
                break
            done.applied.remove()
            assert done.evidence.ok and done.evidence.peak_bytes <= plain * share // 100
            peaks.append(done.evidence.peak_bytes)
        fitting.bench.restore()
    assert len(peaks) > (8 if IS_THOROUGH else 4)
    assert all(one >= other for one, other in itertools.pairwise(peaks))


def test_blocks_are_compiled_one_by_one_under_one_budget() -> None:
    torch.manual_seed(0)
    model, batch = Blocks(), torch.randn(256, 32)
    found = recoup.fit(model, batch, budget="60%", compiled={**AOT, "modules": ["blocks.?"]}, timed=False)
    evidence = found.evidence
    assert evidence.ok and evidence.gradients_equal and evidence.peak_bytes <= evidence.budget_bytes
    assert abs(evidence.predicted_peak_bytes / evidence.peak_bytes - 1) < 0.03
    calls = Counter({g.fingerprint: 0 for g in found.plan.graphs})
    for graph in found.plan.graphs:
        calls[graph.fingerprint] += graph.num_calls
    assert list(calls.values()) == [1, 3]  # equal blocks are one graph; the first's input is data
    assert [p for g in found.plan.graphs for p in g.modules] == [f"blocks.{i}" for i in range(4)]
    assert model._compiled_call_impl is None and model.blocks[0]._compiled_call_impl is not None
    found.applied.remove()
    assert model.blocks[0]._compiled_call_impl is None
    with pytest.raises(recoup.UsageError, match="no module of Blocks is called 'layers"):
        recoup.fit(model, batch, budget="60%", compiled={**AOT, "modules": ["layers.*"]})


def test_equal_blocks_make_different_choices_without_being_compiled_each() -> None:
    torch.manual_seed(0)
    model, batch = Blocks(num_blocks=6), torch.randn(256, 32)
    objective, batch = make_objective(batch)
    with untouched(model, batch, objective.functions):
        fitting = CompiledFitting(model, batch, objective, None, CompileOptions.of({**AOT, "modules": ["blocks.?"]}))
        plain = fitting.record()
        num_choices = []
        for share in range(90, 50, -10):
            torch.compiler.reset()  # no entries of plans before, which all would look at
            fitting._variants.clear()
            fitting._measured.clear()
            counters.clear()
            done = fitting.fit(plain * share // 100, free_bytes=None, timed=False)
            assert done.evidence.ok and done.evidence.gradients_equal
            assert done.evidence.predicted_peak_bytes == done.evidence.peak_bytes <= plain * share // 100
            graphs = done.plan.graphs
            names = Counter(g.fingerprint for g in graphs)
            num_choices.append(max(names.values()))
            assert counters["stats"]["unique_graphs"] <= len(graphs) + len(fitting.recording.graphs)  # plain's again
            calls = done.applied.calls
            again = fitting._compiled(next(iter(fitting._measured)), plain * share // 100).calls
            assert all(again[module].args[1:] == call.args[1:] for module, call in calls.items())  # compiled once
            done.applied.remove()
        fitting.bench.restore()
    assert 1 < max(num_choices) <= MOST_WAYS


class Unequal(nn.Module):
    """Blocks of two widths in turn, the first of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, wide), nn.GELU(), nn.Linear(wide, 32), nn.Tanh()) for wide in (64, 128) * 3
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the stream's end."""
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return x.square().mean()


def test_unequal_blocks_and_one_that_is_called_twice() -> None:
    torch.manual_seed(0)
    model, batch = Unequal(), torch.randn(256, 32)
    found = recoup.fit(model, batch, budget="70%", compiled={**AOT, "modules": ["blocks.?"]}, timed=False)
    evidence = found.evidence
    assert evidence.ok and evidence.gradients_equal and evidence.peak_bytes <= evidence.budget_bytes
    assert abs(evidence.predicted_peak_bytes / evidence.peak_bytes - 1) < 0.03
    whose = [set(g.modules) for g in found.plan.graphs]
    assert set.union(*whose) == {f"blocks.{i}" for i in range(6)}
    found.applied.remove()


class Broken(Residual):
    """Blocks behind a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the stream's end."""
        y = x + self.narrow[0](self.wide[0](x))
        torch._dynamo.graph_break()
        return super().forward(y)


def way(name: str, num_blocks: int) -> tuple[Residual, dict[str, Any], dict[str, Any]]:
    """Returns a model with dropout, options of `torch.compile`, and what else `fit` is told."""
    torch.manual_seed(0)
    model = (Broken if name == "graph breaks" else Residual)(num_blocks=num_blocks, dropout=0.1)
    compiled = {"dynamic": {"dynamic": True}, "mode": {"mode": "max-autotune-no-cudagraphs"}}
    step = {"autocast": {"autocast": torch.bfloat16}, "accumulate": {"accumulate": 2}}
    return model, dict(compiled.get(name, {})), dict(step.get(name, {}))


@pytest.mark.parametrize("name", ["dynamic", "autocast", "accumulate", "graph breaks"])
def test_ways_to_run_a_step(name: str) -> None:
    model, options, step = way(name, num_blocks=3)
    found = recoup.fit(model, torch.randn(256, 32), budget="80%", compiled={**AOT, **options}, timed=False, **step)
    evidence = found.evidence
    assert evidence.ok and evidence.gradients_equal and evidence.peak_bytes <= evidence.budget_bytes
    if name == "dynamic":
        model(torch.randn(128, 32)).backward()  # another size: no error, and within the plan's own bytes
    found.applied.remove()


class Labelled(nn.Module):
    """Reads two inputs whose first sizes are equal, and saves both."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = Residual(num_blocks=3), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        scores = self.head((x * x).view(x.shape[0], 4, 8).transpose(1, 2).flatten(1))
        return nn.functional.cross_entropy(scores, labels) + self.inside(x * 2)


def test_a_size_has_the_same_name_whenever_a_graph_is_compiled() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(256, 32), "labels": torch.zeros(256, dtype=torch.long)}
    options = {**AOT, "dynamic": True}
    found = recoup.fit(Labelled(), batch, budget="70%", compiled=options, timed=False)
    assert found.evidence.ok and found.evidence.peak_bytes <= found.evidence.budget_bytes
    assert not [note for note in found.evidence.notes if "other ones" in note]
    assert not [name for tensor in batch.values() for name in vars(tensor) if "dynamic" in name]
    found.applied.remove()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["mode", *(pytest.param(name, marks=thorough) for name in ("dynamic", "accumulate", "graph breaks"))]
)
def test_ways_to_run_a_step_by_inductor(name: str) -> None:
    model, options, step = way(name, num_blocks=2)
    found = recoup.fit(model, torch.randn(256, 32), budget="85%", compiled=options or True, timed=False, **step)
    evidence = found.evidence
    assert evidence.ok and evidence.peak_bytes <= evidence.budget_bytes
    assert abs(evidence.predicted_peak_bytes / evidence.peak_bytes - 1) < 0.005  # by the compiler's own plan
    assert evidence.rng_equal
    found.applied.remove()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_under_autocast_is_as_near_as_its_dtype_rounds() -> None:
    torch.manual_seed(0)
    model, batch = Residual(num_blocks=2, dropout=0.1), torch.randn(256, 32)
    found = recoup.fit(model, batch, budget="85%", compiled=True, timed=False, autocast=torch.bfloat16)
    evidence = found.evidence
    assert evidence.ok and evidence.peak_bytes <= evidence.budget_bytes and evidence.rng_equal
    assert 1e-4 < evidence.max_gradient_error < 4e-2  # roundings of bfloat16, not of the float32 that gradients have
    found.applied.remove()


@pytest.mark.parametrize("budget", ["60%", "min", "auto"])
def test_a_budget_of_what_is_not_measured_is_refused(budget: str) -> None:
    with pytest.raises(UsageError, match="runs none"):
        recoup.compile(nn.Linear(2, 2), budget=budget)


def test_the_command_line_refuses_a_page_of_a_compiled_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("def target(): return {}\n")
    page = str(tmp_path / "page.html")
    assert run(["fit", str(tmp_path / "model.py"), "--budget", "50%", "--compiled", "--html", page]) == 2
    assert "leave out --html" in capsys.readouterr().err


def test_graph_breaks_are_no_more_than_torchs_own() -> None:
    counted = []
    for way in ("torch", "ours"):
        torch.compiler.reset()
        counters.clear()
        model = Broken(num_blocks=1)
        if way == "torch":
            model.compile(backend="aot_eager")
        else:
            recoup.compile(model, budget="1MiB", compiled=AOT)
        model(torch.randn(8, 32)).backward()
        counted.append((sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]))
    assert counted[0] == counted[1] == (1, 2)
