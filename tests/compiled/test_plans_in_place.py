"""Models that are compiled already, and eager plans where torch.compile compiles the model."""

from __future__ import annotations

import pytest
import torch

import recoup
from recoup.errors import ConflictError, OtherStepWarning
from recoup.ir.decision import Offload, Rebuild, Recompute
from recoup.ir.decision.base import Decision
from recoup.runtime.apply import apply_decisions
from tests.compiled.models import Residual


@pytest.mark.slow
@pytest.mark.parametrize(
    "decision", [Rebuild(path="", marks=()), Offload(path="wide.0"), Recompute(path="wide.0")], ids=lambda d: d.action
)
def test_an_eager_plan_that_compiled_code_leaves_out_is_told_of(decision: Decision) -> None:
    model, batch = Residual(num_blocks=1), torch.randn(32, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # no graph break by the plan
    with apply_decisions(model, [decision]):
        if decision.is_region:
            compiled(batch).backward()
        else:
            with pytest.warns(OtherStepWarning, match=f"without the plan's `{decision.action}`.*compiled=True"):
                compiled(batch).backward()
    torch.compiler.reset()


def test_what_torch_compile_returns_is_refused_with_what_to_pass() -> None:
    model, batch = torch.compile(Residual(num_blocks=1), backend="aot_eager"), torch.randn(4, 32)
    with pytest.raises(ConflictError, match=r"compiled=True.*pass `model\._orig_mod`"):
        recoup.fit(model, batch, budget="50%", compiled=True)
    bare = Residual(num_blocks=1)
    bare.compile(backend="aot_eager")
    with pytest.raises(ConflictError, match="compiled=True"):
        recoup.fit(bare, batch, budget="50%")
