"""Exported code, run in a process of its own without recoup: the same gradients, and the same peak as the plan."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import recoup
from recoup.errors import UsageError
from recoup.evidence.memory import measure_peak
from recoup.export.plain_torch import export_torch
from recoup.ir.decision import Decision, Loop, Recompute, Rederive
from recoup.ir.plan import Plan
from tests.ir.test_schema import make_plan
from tests.models import ConvNet, Stack, make, same, step
from tests.thorough import thorough

Regions = list[tuple[str, ...]]
CASES: list[tuple[str, Regions]] = [
    ("stack", [("layers.0",), ("layers.2",)]),
    ("stack", [("layers.0", "layers.1", "layers.2")]),
    ("batch-norm", [("layers.0",), ("layers.1",)]),
    ("batch-norm", [("layers.0", "layers.1"), ("layers.2", "layers.3")]),
    ("conv", [("net.body",)]),
    ("gpt2", [("transformer.h.0",), ("transformer.h.1",)]),
    ("gpt2", [("transformer.h.0", "transformer.h.1")]),
    ("llama", [("model.layers.0", "model.layers.1"), ("model.layers.2",)]),
    ("llama", [("model.layers.0",), ("model.layers.0.mlp",), ("model.layers.2",)]),
]


def plan_of(regions: Regions, **changes: Any) -> Plan:
    decisions = tuple(Recompute(path=first, span=tuple(rest)) for first, *rest in regions)
    return make_plan(decisions=decisions, **changes)


def applied(plan: Plan, model: torch.nn.Module) -> torch.nn.Module:
    namespace = types.ModuleType("exported")
    code = export_torch(plan).code
    assert "import recoup" not in code and "from recoup" not in code
    exec(compile(code, "exported.py", "exec"), namespace.__dict__)
    namespace.apply_plan(model)
    return model


@pytest.mark.parametrize(("kind", "regions"), CASES, ids=lambda v: v if isinstance(v, str) else str(len(v)))
def test_gradients_buffers_and_random_streams_are_those_of_the_plain_step(kind: str, regions: Regions) -> None:
    model, batch, loss = make(kind)
    twin, _, _ = make(kind)
    applied(plan_of(regions), model)
    for seed in (1, 2):  # the second step sees the buffers that the first one left
        assert same(step(model, batch, loss, seed=seed), step(twin, batch, loss, seed=seed))


class _Remembering(torch.nn.Module):
    """Its factor depends on what earlier calls left in attributes of every kind."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.steps, self.past, self.seen, self.by_name, self.last = 0, (), seen, {"scales": [1.0]}, None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.count = self.count + 1  # another tensor: no storage is written
        self.past = (*self.past, self.steps)
        self.seen.append(float(self.count))
        self.by_name["scales"].append(0.9 * self.by_name["scales"][-1])
        if self.last is None:
            self.first_input = x.detach()
        scale = self.by_name["scales"][-1] * len(self.past) * len(self.seen) / self.steps
        output = torch.tanh(self.linear(x) * scale + (0 if self.last is None else self.last))
        self.last = 0.5 * output  # with its graph
        return torch.sin(output + self.first_input)

    def extra_state(self) -> tuple[Any, ...]:
        return self.steps, self.past, self.seen, self.by_name, float(self.count), self.last, self.first_input


@pytest.mark.parametrize("regions", [[("0",), ("2",)], [("0", "1", "2")]], ids=["alone", "span"])
def test_attributes_change_once_and_are_as_the_forward_found_them(regions: Regions) -> None:
    def trained(plan: Plan | None) -> list[Any]:
        torch.manual_seed(0)
        seen: list[float] = []
        model = torch.nn.Sequential(*(_Remembering(seen) for _ in range(3)))
        if plan is not None:
            applied(plan, model)
        x = torch.randn(4, 8)
        found: list[Any] = []
        for _ in range(3):
            model.zero_grad()
            output = model(x)
            output.square().mean().backward()
            found += [p.grad for p in model.parameters()]
            for block in model:
                block.last = block.last.detach()  # what a loop that cuts its graph does
                found += block.extra_state()
            assert all(block.seen is seen for block in model)
        return found

    for found, expected in zip(trained(plan_of(regions)), trained(None), strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(found, expected)
        else:
            assert found == expected


def test_an_attribute_that_is_changed_in_place_is_warned_of() -> None:
    class Counting(torch.nn.Linear):
        count = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return torch.tanh(super().forward(x)) * self.count

    model = torch.nn.Sequential(Counting(4, 4))
    model[0].count = torch.zeros(())
    applied(plan_of([("0",)]), model)
    with pytest.warns(UserWarning, match="count was changed in place since the forward"):
        model(torch.randn(2, 4)).sum().backward()


def test_what_attributes_hold_does_not_keep_the_graphs_of_earlier_steps() -> None:
    class Keeping(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = [torch.tanh(super().forward(x))]
            return torch.sin(self.last[0])

    model = torch.nn.Sequential(Keeping(4, 4))
    applied(plan_of([("0",)]), model)
    graphs = []
    for _ in range(3):
        model(torch.randn(2, 4))  # no backward: an evaluation that forgot `no_grad`
        model[0].last[0].grad_fn.metadata["lives"] = lives = torch.nn.Identity()
        graphs.append(weakref.ref(lives))
        del lives
    gc.collect()
    assert [graph() is not None for graph in graphs] == [False, False, True]


def _peak(model: torch.nn.Module, batch: Any) -> int:
    def run() -> None:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()

    def peak() -> int:
        gc.collect()  # what earlier steps left in cycles is not to be let go, or not, in the middle of this one
        found = measure_peak(run, device=torch.device("cpu"), held_bytes=0)
        model.zero_grad()
        return found

    run()
    model.zero_grad()
    return min(peak() for _ in range(2))  # what a cycle holds for a while shows as more bytes


def _llama() -> tuple[torch.nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=128, intermediate_size=384, num_attention_heads=4, vocab_size=256
    )
    ids = torch.randint(0, 256, (4, 256))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("build", "regions"),
    [
        pytest.param(
            lambda: (Stack(128, 6), torch.randn(1024, 128)), [(f"layers.{i}",) for i in range(5)], marks=thorough
        ),
        (lambda: (Stack(128, 6, batch_norm=True), torch.randn(1024, 128)), [("layers.0", "layers.1"), ("layers.2",)]),
        (_llama, [(f"model.layers.{i}",) for i in range(6)]),
        pytest.param(_llama, [("model.layers.0", "model.layers.1"), ("model.layers.4",)], marks=thorough),
    ],
    ids=["stack", "batch-norm-span", "llama", "llama-spans"],
)
@pytest.mark.slow
def test_the_peak_is_within_one_percent_of_the_plan(build: Any, regions: Regions) -> None:
    model, batch = build()
    plain = _peak(model, batch)
    plan = dataclasses.replace(plan_of(regions), fingerprint=_fingerprint(model), model_class=type(model).__name__)
    with recoup.apply(model, plan):
        planned = _peak(model, batch)
    exported = _peak(applied(plan, model), batch)
    assert exported == pytest.approx(planned, rel=0.01), plain
    assert exported < 0.9 * plain


def _fingerprint(model: torch.nn.Module) -> str:
    from recoup.capture.fingerprint import fingerprint

    return fingerprint(model)


@pytest.mark.slow
def test_a_fresh_file_needs_no_recoup(tmp_path: Path) -> None:
    plan = plan_of([("0", "1"), ("3",)])
    script = export_torch(plan).code + (
        "\nimport sys\n"
        "block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Tanh())\n"
        "model = torch.nn.Sequential(*(block() for _ in range(5)))\n"
        "x = torch.randn(4, 8)\n"
        "def gradients():\n"
        "    torch.manual_seed(1)\n"
        "    model.zero_grad()\n"
        "    model(x).square().sum().backward()\n"
        "    return [p.grad.clone() for p in model.parameters()]\n"
        "before = gradients()\n"
        "apply_plan(model)\n"
        "assert all(torch.equal(a, b) for a, b in zip(before, gradients()))\n"
        "assert not any(name.startswith('recoup') for name in sys.modules)\n"
        "print('equal')\n"
    )
    path = tmp_path / "fresh.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-S", "-c", _WITHOUT_RECOUP, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr


# Runs a file with every path but those that hold recoup.
_WITHOUT_RECOUP = f"""
import os, runpy, sys
sys.path = [p for p in {[p for p in sys.path if p]!r} if not os.path.isdir(os.path.join(p, "recoup"))]
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_an_export_on_another_model_changes_nothing() -> None:
    model = ConvNet()
    with pytest.raises(ValueError, match=r"no module \['layers.0'\]"):
        applied(plan_of([("body",), ("layers.0",)]), model)
    assert not any("forward" in vars(m) for m in model.modules())


def test_evaluation_and_copies_work() -> None:
    import copy

    model, batch, loss = make("stack")
    applied(plan_of([("layers.0", "layers.1"), ("layers.2",)]), model)
    twin = copy.deepcopy(model)
    assert same(step(twin, batch, loss), step(model, batch, loss))
    assert twin.layers[0].forward.__self__ is twin.layers[0]
    with torch.no_grad():
        assert torch.isfinite(model.eval()(batch))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_a_region_may_hold_a_traced_module() -> None:
    traced = torch.jit.trace(torch.nn.Linear(8, 8), torch.randn(2, 8))  # type: ignore[no-untyped-call]
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8), traced), torch.nn.Linear(8, 1))
    batch = torch.randn(4, 8)
    expected = model(batch)
    assert torch.equal(applied(plan_of([("0",)]), model)(batch), expected)


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ((), "no regions"),
        ((Rederive(path=""),), "no regions"),
        ((Recompute(path="a", call=1),), "tells calls of `a` apart"),
        ((Loop(path="a", chunk=4, calls=12),), "the first 12 calls of `a` only"),
        (
            (Recompute(path="a", span=("b",)), Recompute(path="b")),
            "`b` is a call of two regions",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(decisions: tuple[Decision, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export_torch(make_plan(decisions=decisions))


def test_what_is_left_out_is_said() -> None:
    decisions = (Rederive(path=""), Recompute(path="layers.0"))
    made = export_torch(make_plan(decisions=decisions))
    assert "1 decisions rederive" in made.left_out[0]
    regions = (
        Recompute(path="layers.0", keep=("attention",), offload=True),
        Loop(path="layers.1", chunk=4),
    )
    said = " ".join(export_torch(make_plan(decisions=regions)).left_out)
    assert "1 regions keep results (attention)" in said
    assert "`layers.1` is recomputed 4 calls at a time" in said
    assert "inputs of regions go to the host" in said
    assert "Not the whole plan" in made.code
    assert "Predicted" not in made.code
