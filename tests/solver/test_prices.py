"""What the solver thinks that a decision frees is what the simulation of the applied decision says it frees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from recoup.capture.step import make_objective
from recoup.ir.decision import Ambient
from recoup.planner.request import planner_for
from recoup.planner.simulator import EVERYWHERE
from recoup.planner.step import PlannedStep
from recoup.solver.intervals import forward_ops
from recoup.solver.problem import Option
from recoup.solver.sequence import Call, Choice, Line, Pick
from recoup.solver.ways import Replay, Run

_WIDTH = 32


class _Attention(nn.Module):
    """Its attention's result is kept by the attention and by the product behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (m(y).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(found.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.gate, self.up = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _gelu() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.LayerNorm(4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
    )


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def _step(name: str, device: str) -> PlannedStep:
    part = {"attention": _Attention, "gated": _Gated, "gelu": _gelu, "conv": _conv}[name]
    model = nn.Sequential(*(part() for _ in range(2)))
    batch = torch.randn(2, 8, 32, 32) if name == "conv" else torch.randn(4, 64, _WIDTH)
    objective, given = make_objective(batch, loss=lambda output, _: output.square().mean())
    planner, _, _ = planner_for(
        model, given, objective=objective, optimizer=None, device=device, actions=None, cost=None
    )
    return planner.step


def _option(line: Line, leaf: int, ambient: Ambient) -> Option:
    options = line.leaves[leaf].options
    return next((o for o in options if o.ambient == ambient), options[0])


def _run(line: Line, first: int, last: int, rederived: set[int] | None = None) -> Choice:
    """Returns a choice over leaves [first, last) in which some are rederived, counted from `first`."""
    chosen: list[Pick] = []
    for leaf in range(first, last):
        option = _option(line, leaf, "rederive" if rederived and leaf in rederived else "save")
        chosen.append(Pick(first=leaf - first, last=leaf - first + 1, way=Run(option.ambient)))
    return tuple(chosen)


def _calls(call: Call) -> Iterator[Call]:
    for part in call.parts:
        if isinstance(part, Call):
            yield part
            yield from _calls(part)


@pytest.mark.parametrize("device", ["cpu-generic", "a100-80gb"])
@pytest.mark.parametrize("name", ["attention", "gated", "gelu", "conv"])
def test_what_a_decision_frees(name: str, device: str) -> None:
    step = _step(name, device)
    simulator = step.simulator
    view = next(v for v in step.views.plain.views if v.name == "all")
    line = view.solver.line
    num = len(line.leaves)
    units = [set(unit) for unit in line.units]
    alone = {i for i in range(num) if len(line.leaves[i].options) > 1} - set().union(*units)
    units += [{i} for i in alone]
    assert units
    for unit in (*units, set().union(*units)):
        freed = simulator.plain.saved_bytes - simulator.simulate(view.decide(_run(line, 0, num, unit))).saved_bytes
        thought = sum(_option(line, i, "save").saved_bytes - _option(line, i, "rederive").saved_bytes for i in unit)
        assert thought == freed, [line.leaves[i].owner for i in sorted(unit)]


def test_inputs_of_regions_are_rebuilt() -> None:
    # What the call before them computes again in a cheap op is not kept for a region.
    step = _step("gelu", "cpu-generic")
    simulator = step.simulator
    view = next(v for v in step.views.plain.views if v.name == "all")
    line = view.solver.line
    num = len(line.leaves)
    found = 0
    for call in _calls(line.root):
        region = call.block.region
        if region is None or not region.is_alone or not region.begins or call.first == 0:
            continue
        inner = _run(line, call.first, call.last)
        pick = Pick(first=call.first, last=call.last, way=Replay(), rank=call.rank, num_calls=1, inner=inner)
        after = [Pick(first=i, last=i + 1, way=Run(_option(line, i, "save").ambient)) for i in range(call.last, num)]
        chosen = view.decide((*_run(line, 0, call.first), pick, *after))
        freed = simulator.plain.saved_bytes - simulator.simulate(chosen).saved_bytes
        saved = sum(_option(line, i, "save").saved_bytes for i in range(call.first, call.last))
        assert abs(saved - region.saved_bytes - freed) <= 4096, call.block.path  # tensors too small to be rebuilt
        found += region.entry_seconds > 0
    assert found


@pytest.mark.parametrize("device", ["cpu-generic", "a100-80gb"])
def test_a_plan_adds_no_ops_to_forward(device: str) -> None:
    simulator = _step("attention", device).simulator
    rederived = simulator.simulate_priced(EVERYWHERE).trace
    assert rederived.num_forward_ops == simulator.trace.num_forward_ops
    names = [
        [trace.signatures[trace.ops[i].signature].name for i in forward_ops(trace)]
        for trace in (simulator.trace, rederived)
    ]
    assert names[0] == names[1]
