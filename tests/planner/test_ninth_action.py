"""A ninth action, whole: its decision, its hook, its strategy. Nothing outside of this file knows of it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from recoup.capture.spec import StepSpec
from recoup.cost.model import FlopsCost
from recoup.ir.decision import DECISIONS, Decision, Recompute, describe_decisions
from recoup.ir.plan import Plan
from recoup.planner.driver import Planner, plan_for_budget
from recoup.planner.incumbents import Incumbents
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Proposals, Strategy
from recoup.planner.strategies.registry import STRATEGIES
from recoup.runtime.apply import apply_decisions
from recoup.runtime.hooks import HOOKS, Hook

# -- the action: what autograd saves in a call is held in half precision --------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Squeeze(Decision):
    action: ClassVar[str] = "squeeze"
    verb: ClassVar[str] = "squeeze"
    is_exact: ClassVar[bool] = False

    bits: int = 16

    def check(self) -> None:
        self.require_at_least(16, "bits")


def run_squeezed(decision: Squeeze, patched: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    with saved_tensors_hooks(lambda t: t.half() if t.dtype == torch.float32 else t, lambda t: t.float()):
        return forward(*args, **kwargs)


class SqueezeStrategy(Strategy):
    actions: ClassVar[tuple[str, ...]] = ("squeeze",)
    is_exact: ClassVar[bool] = False

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        paths = [c.path for c in step.calls_trace.calls if c.kind == "GELU"]
        return cls(paths) if "squeeze" in step.actions else None

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        for num in range(1, len(self._paths) + 1):
            candidate = yield tuple(Squeeze(path=path) for path in self._paths[:num])
            if candidate.peak_bytes <= budget_bytes:
                return


# -- the tests -------------------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.GELU())))


def test_a_ninth_action_plans_is_written_applied_and_undone() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2048, 8)
    hooks = {**HOOKS, Squeeze: Hook(run=run_squeezed)}
    planner = Planner(
        StepSpec(model=model, batch=x),
        cost=FlopsCost(),
        actions=("squeeze",),
        strategies=(*STRATEGIES, SqueezeStrategy),
        hooks=hooks,
    )
    all_squeezed = planner.simulate(tuple(Squeeze(path=str(i)) for i in (1, 3, 5, 7)))
    assert all_squeezed.peak_bytes < planner.plain.peak_bytes and not all_squeezed.is_exact
    plan, _ = plan_for_budget(planner, budget=all_squeezed.peak_bytes, free_bytes=None, device="cpu")
    assert plan.decisions and all(isinstance(d, Squeeze) for d in plan.decisions)

    data = json.loads(json.dumps(plan.to_json()))
    assert data["decisions"][0] == {"action": "squeeze", "path": "1", "call": None, "bits": 16}
    assert Plan.from_json(data, known=(*DECISIONS, Squeeze)) == plan
    assert describe_decisions(plan.decisions)[0].startswith("squeeze ")

    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with apply_decisions(model, (*plan.decisions, Recompute(path="0")), hooks=hooks):
        model(x).sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert not all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    torch.testing.assert_close(found, plain, rtol=0.02, atol=0.5)
    assert not any("forward" in m.__dict__ for m in model.modules())
