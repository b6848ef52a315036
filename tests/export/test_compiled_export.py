"""A plan of a compiled step as a file that needs torch alone."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import shutil
import subprocess
import symtable
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import recoup
from recoup.cli.main import run
from recoup.errors import UsageError
from recoup.evidence.memory import measure_peak
from recoup.export.compiled import export_compiled
from recoup.ir.compiled_plan import CompiledGraph, CompiledPlan, GraphChoice
from tests.compiled.models import Blocks, Residual


def plan_of(*graphs: CompiledGraph) -> CompiledPlan:
    return CompiledPlan(
        model_class="Residual",
        backend="inductor",
        torch_version=torch.__version__,
        budget_bytes=1,
        predicted_peak_bytes=1,
        plain_peak_bytes=2,
        graphs=graphs,
    )


def test_what_torch_does_by_itself_is_not_exported() -> None:
    alone = CompiledGraph(
        fingerprint="f",
        modules=("",),
        num_calls=1,
        num_ops=1,
        choice=GraphChoice(held=(), rerun=(), order=()),
        held_bytes=0,
        rerun_seconds=0.0,
        is_torch=True,
    )
    with pytest.raises(UsageError, match="nothing to export"):
        export_compiled(plan_of(alone))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_name_that_the_file_uses_is_in_it(backend: str) -> None:
    choice = GraphChoice(held=("mm",), rerun=(), order=("mm",))
    graph = CompiledGraph(
        fingerprint="f", modules=("",), num_calls=1, num_ops=1, choice=choice, held_bytes=4, rerun_seconds=0.0
    )
    code = export_compiled(dataclasses.replace(plan_of(graph), backend=backend)).code
    top = symtable.symtable(code, "divided.py", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}

    def undefined(scope: symtable.SymbolTable) -> set[str]:
        used = {s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced()}
        return used.union(*map(undefined, scope.get_children())) - defined - set(dir(builtins))

    assert not undefined(top)
    assert "_torch." not in code


def test_modules_that_make_the_same_choices_are_one_variant() -> None:
    def graph(name: str, held: str, *modules: str) -> CompiledGraph:
        return CompiledGraph(
            fingerprint=name,
            modules=modules,
            num_calls=len(modules),
            num_ops=1,
            choice=GraphChoice(held=(held,), rerun=(), order=(held,)),
            held_bytes=4,
            rerun_seconds=0.0,
        )

    plan = plan_of(graph("first", "a", "h.0"), graph("block", "b", "h.1", "h.2"), graph("block", "c", "h.3"))
    assert CompiledPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "2 graph(s), 3 choice(s)" in str(plan) and "h.1, h.2: 1 ops of forward, 2 times a step" in str(plan)
    scope: dict[str, Any] = {}
    exec(export_compiled(plan).code, scope)
    held = [(paths, {n: c["held"] for n, c in graphs.items()}) for paths, graphs in scope["VARIANTS"]]
    assert held == [
        (["h.0", "h.3"], {"first": ("a",), "block": ("c",)}),
        (["h.1", "h.2"], {"first": ("a",), "block": ("b",)}),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while Dynamo compiles
def test_the_file_compiles_blocks_by_their_variants(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Blocks(num_blocks=5), torch.randn(256, 32)
    found = recoup.fit(
        model, batch, budget="72%", compiled={"backend": "aot_eager", "modules": ["blocks.?"]}, timed=False
    )
    assert found.evidence.ok and len(found.plan.graphs) > len({g.fingerprint for g in found.plan.graphs})
    peak = measure_peak(lambda: model(batch).backward(), device=torch.device("cpu"), held_bytes=0)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    found.applied.remove()
    scope: dict[str, Any] = {}
    exec(export_compiled(found.plan).code, scope)
    torch.compiler.reset()
    counters.clear()
    scope["compile_modules"](model)
    model(batch).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    assert counters["stats"]["unique_graphs"] == len(found.plan.graphs)
    model.zero_grad()
    assert peak == measure_peak(lambda: model(batch).backward(), device=torch.device("cpu"), held_bytes=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_file_divides_as_the_plan_does(tmp_path: Path, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch.manual_seed(0)
    model, batch = Residual(num_blocks=3, dropout=0.1), torch.randn(256, 32)
    found = recoup.fit(model, batch, budget="70%", compiled={"backend": backend}, timed=False)
    torch.manual_seed(1)
    model(batch).backward()
    expected = [p.grad for p in model.parameters()]
    found.applied.remove()
    plan, code = tmp_path / "plan.json", tmp_path / "divided.py"
    found.plan.save(plan)
    assert run(["export", str(plan), "--to", "compile", "--out", str(code)]) == 0
    torch.save((model, batch, expected), tmp_path / "case.pt")
    (tmp_path / "models.py").write_text(Path("tests/compiled/models.py").read_text())
    program = f"""
import sys, warnings
warnings.simplefilter("error", UserWarning)
sys.modules["recoup"] = None
import torch, divided
model, batch, expected = torch.load({str(tmp_path / "case.pt")!r}, weights_only=False)
model.zero_grad()
model.compile(backend=divided.plan_backend())
torch.manual_seed(1)
model(batch).backward()
assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected))
"""
    paths = f"{tmp_path}:{Path.cwd()}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]
