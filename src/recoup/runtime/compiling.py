"""The warning that a plan for eager steps gives when `torch.compile` compiles its model."""

from __future__ import annotations

import warnings

import torch

from recoup.errors import OtherStepWarning


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # run while Dynamo traces: no graph break
def tell_compiled(action: str, model_class: str, path: str) -> None:
    """Warns that the graph being compiled leaves out an action of the plan."""
    warnings.warn(
        f"torch.compile runs `{path or model_class}` without the plan's `{action}`: compiled code does not come by the "
        "engine, so the peak may pass the plan's budget. Gradients are right. Take the plan off (`remove()`) and use "
        "recoup.fit(model, batch, budget=..., compiled=True), which plans the compiled step. [E303]",
        OtherStepWarning,
        stacklevel=2,
    )
